"""Where the sentences of a text end, found while the text comes.

Pure: no tokens here. A boundary is a number of characters: a text cut there ends with a whole
sentence, and with no blank. It is known as soon as the characters behind it say so ("3." may become
"3.5"), and is then never taken back. Every character is looked at once.

What ends a sentence: a mark of Unicode's Sentence_Terminal with the quotes and brackets that close
behind it, a paragraph, an item of a list, a code block. Marks of scripts with capitals need a blank
behind them, and no small letter behind that. Inside a code block (``` or ~~~) there are no
sentences; the ends of its lines are kept apart, as a last resort.
"""

from __future__ import annotations

import re
import unicodedata

# Sentence_Terminal of Unicode 14, without those below, and with Khmer's, which later versions have.
_PLAIN_RANGES = """
0589 061D-061F 06D4 0700-0702 07F9 0837 0839 083D-083E 0964-0965 104A-104B 1362 1367-1368 166E
1735-1736 17D4-17D5 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F
2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F
AAF0-AAF1 ABEB FE56-FE57 FF01 FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89 11047-11048 110BE-110C1
11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 1144B-1144C 115C2-115C3
115C9-115D7 11641-11642 1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8
16A6E-16A6F 16AF5 16B37-16B38 16B44 16E98 1BC9F 1DA88
"""
_PERIODS = frozenset(".．﹒")  # also in numbers, abbreviations and names
_MARKS = frozenset("!?…‼‽⁇⁈⁉")  # end a sentence where a blank follows, or a letter without case
_CLOSING_CATEGORIES = frozenset(("Pe", "Pf"))
_CLOSERS = frozenset("\"'“*_~")  # besides; the last three end emphasis
_COLONS = (":", "：")

# Before a capital too. What is no less a word of its own (max, no) is not here.
_ABBREVIATION_WORDS = """
    adm al approx apt assn assoc asst atty aug av ave bldg blvd bros bzw ca capt cf cmdr co col cont
    corp cpl cpt dec dept det dir dist div dr drs ed eds eg encl engl est etc evtl exc excl feb fr
    frau gen ggf gov govt hon hosp hr hrsg inc incl inkl insp jan jr kap lt ltd maj mfg mgr
    misc mlle mme mr mrs ms mt mtn např nov oct okt op orig pl pres prof ps pty rep resp rev sec sen
    sept sgt sog sr sra srta st str supt tab tel temp tj trans treas tzv univ usw vgl viz vs zb
"""
_BEFORE_NUMBER_WORDS = """
    art bd ch chap eq eqs fig figs ln max min nn no nos nr nrs num p par pp pt ref vol vols č čl
"""
_ABBREVIATIONS = frozenset(_ABBREVIATION_WORDS.split())
_BEFORE_NUMBERS = frozenset(_BEFORE_NUMBER_WORDS.split())
_DOTTED = re.compile(r"[^\W\d_](\.[^\W\d_])+")  # e.g, U.S
_BEFORE_WORD = "\"'“‘«„¿¡([{<*_~-–—/"  # may stand before a word without a blank
_ITEM = re.compile(r"\s*(?:[-*+•|]|\(?(?:\d{1,9}|[^\W\d_])[.)])\s")
_MIN_FENCE = 3
_CAPITAL = "A"  # what a sentence may begin with
_HEADING = re.compile(r"\s{0,3}#{1,6}\s")


def _spread(ranges: str) -> frozenset[str]:
    ends = [part.partition("-") for part in ranges.split()]
    return frozenset(
        chr(code) for low, _, high in ends for code in range(int(low, 16), int(high or low, 16) + 1)
    )


_PLAIN = _spread(_PLAIN_RANGES)
_ALL = _PLAIN | _PERIODS | _MARKS


class SentenceEnds:
    """Reads one text; `sentence` and `line` say what is certain so far."""

    sentence: int  # characters up to the last end of a sentence; -1: there was none
    line: int  # characters up to the last end of a line inside a code block; -1

    def __init__(self) -> None:
        self.sentence = self.line = -1
        self._at = 0  # characters read
        self._content_end = 0  # behind the last character that is no blank
        self._last = ""  # that character
        self._line: list[str] = []  # the current one, as far as it came
        self._word: list[str] = []  # since the last blank
        self._begins_line = False  # the word does
        self._opening = _Opening()  # of a code block, if the current line is one
        self._fence = ""  # what opened the code block that we are in
        self._paragraph_end = -1  # of the lines since the last blank one, if they end a thought
        self._run: _Run | None = None  # marks that wait for what follows them

    def feed(self, text: str) -> None:
        """The next characters."""
        for character in text:
            if self._fence:
                self._read_code(character)
            else:
                self._read(character)

    def finish(self) -> None:
        """The text is cut here: what waits for more is decided without it."""
        if self._fence and _closes("".join(self._line), self._fence):
            self._note(self._content_end)
        run, self._run = self._run, None
        if run is not None:
            word = run.word if run.has_gap else self._word_before(run)
            if run.is_end(None, word):
                self._note(run.end)

    @property
    def possible(self) -> tuple[int, ...]:
        """Places with text behind them that may still turn out to be ends."""
        is_blank = self._is_blank_line
        places: list[int] = []
        if self._run is not None:
            places.append(self._run.end)
        if self._paragraph_end >= 0 and (is_blank or self._opening.is_possible):
            places.append(self._paragraph_end)
        if not is_blank and (self._fence or not self._leads_on()):
            places.append(self._content_end)
        return tuple(place for place in places if self.sentence < place < self._at)

    @property
    def _is_blank_line(self) -> bool:
        return self._content_end <= self._at - len(self._line)

    def _leads_on(self) -> bool:
        """Whether the current line, as it is, belongs to what comes behind it."""
        head = "".join(self._line[:12])
        is_heading = _HEADING.match(head) is not None
        return is_heading or self._last in _COLONS or self._opening.is_fence

    def _note(self, end: int) -> None:
        self.sentence = max(self.sentence, end)

    def _read(self, character: str) -> None:
        is_blank, is_mark = character.isspace(), character in _ALL
        if self._run is not None:
            self._go_on(self._run, character, is_blank, is_mark)
        if is_mark and self._run is None:
            is_first = self._begins_line if self._word else self._is_blank_line
            self._run = _Run(character, self._at + 1, len(self._word), is_first)
        if self._run is not None and self._run.is_plain:
            self._note(self._run.end)
        if character == "\n":
            self._at += 1
            self._end_line()
            return
        self._opening.add(character, is_blank=is_blank)
        if is_blank:
            self._word.clear()
        elif not self._word:
            self._begins_line = self._is_blank_line
        self._keep(character, is_blank)
        if not is_blank:
            self._word.append(character)

    def _keep(self, character: str, is_blank: bool) -> None:
        self._at += 1
        self._line.append(character)
        if not is_blank:
            self._content_end, self._last = self._at, character

    def _go_on(self, run: _Run, character: str, is_blank: bool, is_mark: bool) -> None:
        """What a character says of the marks before it."""
        if not run.has_gap and (is_mark or _closes_quote(character)):
            run.add(character, self._at + 1, is_mark=is_mark)
        elif run.is_plain:
            self._run = None
        elif is_blank:
            if not run.has_gap:
                run.word, run.has_gap = self._word_before(run), True
                if not run.is_end(_CAPITAL, run.word):
                    self._run = None
        else:
            if run.is_end(character, run.word):
                self._note(run.end)
            self._run = None

    def _word_before(self, run: _Run) -> str:
        return "".join(self._word[: run.num_word])

    def _end_line(self) -> None:
        line, opening = "".join(self._line), self._opening
        self._line.clear()
        self._word.clear()
        self._opening = _Opening()
        if opening.is_fence:
            self._end_paragraph()
            self._fence, self._run = opening.fence, None
        elif not line.strip():
            self._end_paragraph()
        elif _HEADING.match(line) or self._last in _COLONS:
            self._paragraph_end = -1
        else:
            self._paragraph_end = self._content_end
            if _ITEM.match(line):
                self._note(self._content_end)

    def _end_paragraph(self) -> None:
        self._note(self._paragraph_end)
        self._paragraph_end = -1

    def _read_code(self, character: str) -> None:
        if character != "\n":
            self._keep(character, character.isspace())
            return
        line = "".join(self._line)
        self._at += 1
        self._line.clear()
        if _closes(line, self._fence):
            self._fence = ""
            self._note(self._content_end)
        elif line.strip():
            self.line = self._content_end


class _Opening:
    """Whether a line that is still coming opens a code block: ``` or ~~~, and a language."""

    __slots__ = ("_is_running", "fence", "is_possible")

    def __init__(self) -> None:
        self.is_possible = True
        self.fence = ""
        self._is_running = True  # its marks are still coming

    @property
    def is_fence(self) -> bool:
        return self.is_possible and len(self.fence) >= _MIN_FENCE

    def add(self, character: str, *, is_blank: bool) -> None:
        if not self.is_possible or (is_blank and not self.fence):
            return
        if self._is_running and character == (self.fence[:1] or character) and character in "`~":
            self.fence += character
            return
        self._is_running = False
        has_enough = len(self.fence) >= _MIN_FENCE
        self.is_possible = has_enough and not (character == "`" and self.fence[0] == "`")


class _Run:
    """Marks one behind another, with what closes between and behind them: `?!”`."""

    __slots__ = ("begins_line", "end", "has_gap", "is_mark", "is_plain", "num_word", "word")

    def __init__(self, mark: str, end: int, num_word: int, begins_line: bool):
        self.end = end  # behind its last character
        self.num_word = num_word  # characters of the word before it
        self.begins_line = begins_line  # that word does
        self.is_plain = mark in _PLAIN  # ends a sentence whatever follows
        self.is_mark = mark in _MARKS  # more than one period
        self.has_gap = False  # a blank came behind it
        self.word = ""  # from the gap on

    def add(self, character: str, end: int, *, is_mark: bool) -> None:
        self.end = end
        if is_mark:
            self.is_plain |= character in _PLAIN
            self.is_mark = True

    def is_end(self, following: str | None, word: str) -> bool:
        """Whether a sentence ends with it.

        Args:
            following: the next character that is no blank; None: the text is cut before it came.
            word: what stands before it; of no use without a gap or a cut.
        """
        if self.is_plain:
            return True
        if following is not None and not self.has_gap:
            return self.is_mark and unicodedata.category(following) == "Lo"
        if following is not None and following.islower():
            return False
        return self.is_mark or not self._is_inside(word.lstrip(_BEFORE_WORD), following)

    def _is_inside(self, word: str, following: str | None) -> bool:
        """Whether a single period is part of its word: an abbreviation, a number, a name."""
        is_cut_off = following is None and not self.has_gap
        small = word.casefold()
        if not word or (len(word) == 1 and word.isalpha() and word.upper() != word.lower()):
            return True
        if word.isdecimal():
            return self.begins_line or is_cut_off
        if small in _BEFORE_NUMBERS:
            return following is None or following.isdecimal()
        if is_cut_off and ("/" in word or "@" in word or small.startswith("www.")):
            return True
        return small in _ABBREVIATIONS or _DOTTED.fullmatch(word) is not None


def _closes_quote(character: str) -> bool:
    return character in _CLOSERS or unicodedata.category(character) in _CLOSING_CATEGORIES


def _closes(line: str, fence: str) -> bool:
    """Whether a line of a code block is its last one."""
    found = line.strip()
    return len(found) >= len(fence) and not found.strip(fence[0])
