"""The long texts that the golden prompts are cut from, written for this purpose.

Plain text only. Each is a little longer than the prompts in prompts.py need.
"""

STORY = """\
The lighthouse at Varn had been dark for eleven years when Marta came to measure it. She was not
there to repair anything. The county wanted to know what the tower would cost to pull down, and a
surveyor who lived two valleys away was cheaper than a firm from the city. She brought a tape, a
level, a flask of tea and a dog that disliked stairs.

From the outside the tower looked sound. The granite had kept its edges, and only the paint had
gone, so that the old red bands showed as faint stains, like the marks that a cup leaves on a
table. The door was locked with a chain, and the key which the office had sent did not fit. She
walked around the base twice, found a window without glass, and lifted the dog through before
she climbed in herself.

Inside it smelled of salt and birds. One hundred and forty-two steps went up in a spiral, and she
counted every one of them aloud, because the last report had said one hundred and forty and the
report before that one hundred and forty-four. The dog stopped at the first landing and lay down
with the air of an animal that had made its decision. Marta went on alone.

On the third landing somebody had left a chair. It was a plain kitchen chair with a cushion, and
next to it stood a crate on which lay a notebook, a pencil and a pair of field glasses wrapped in
an oiled cloth. The dust on the stairs was thick, but there was none on the chair. She opened the
notebook. Each page had a date, a time and a short line in a careful hand: two seals off the point;
wind from the north, a grey ship going west; nothing today, but the light was good. The last entry
was from the morning before.

She sat down, which she had not planned to do, and looked out of the narrow window. From here one
could see the whole bay, the broken pier, the three houses that still had smoke, and beyond them
the long bank of sand where the ferry had run aground in the winter when she was nine. She had
watched that from the hill with her father. He had said that the sea never takes anything by
mistake, and she had been angry with him for a week without knowing why.

It was past noon when she heard steps below. They were slow, with a rest after every ten, and they
did not stop at the first landing, where the dog gave one short bark and then, to her surprise,
was quiet. A man came up into the light. He was perhaps eighty. He carried a thermos and a folded
newspaper, and he looked at her the way one looks at a stranger in the usual seat on a bus.

"You are from the county," he said.

"I am measuring," said Marta. "I did not know that anyone came here."

"Nobody does," he said. "I have come every day since they turned it off. Someone ought to keep
watch, even if there is nothing to light." He put the thermos on the crate. "How many steps did you
make it?"

"One hundred and forty-two."

He nodded, as though she had passed some kind of test. "Then you counted the broken one. Most of
them do not. They step over it, and so it is left out." He took the pencil and wrote the date under
the last line. After the date he wrote the time, and then he stopped and turned the notebook around
so that she could read it, and held out the pencil to her. Marta looked at the page, and at the
bay, and thought of the form in her bag with its single empty box for the cost. Then she wrote\
"""

PROSE = """\
How a small bakery decides how much bread to make is a better lesson in planning than most books
on the subject. Every evening the baker knows three numbers: what was baked, what was sold, and what
was left. The first is under her control, the second is not, and the third is only the difference
between them. If nothing is left at closing time, she has learned that she baked too little, but
not by how much, because the customers who went away with empty hands did not sign a list.

So she looks at the hour. When the last loaf of rye is sold at four, and the shop closes at six,
she can guess that about a fifth of the day's demand went unanswered, and she can bake a little
more on the next day of the same kind. Days have kinds. A rainy Tuesday resembles other rainy
Tuesdays more than it resembles the dry one of last week, and the day before a holiday resembles
nothing but the day before another holiday. She keeps a calendar on the wall with small marks for
rain, for school breaks, and for the market that blocks the street twice a month.

There is a second reason for which she does not simply bake more. Bread that is left has a cost,
but so does the work which it displaced. The oven holds forty loaves. If ten of them are rye that
nobody wants, then ten rolls which somebody did want were never made. Planners call this the price
of capacity; she calls it getting in her own way. The oven is the narrow place, and whatever goes
into it should be what the street will ask for in the next three hours, not what looked good in
the ledger last month.

She also leaves a little room. A quarter of the last batch is dough that has been shaped but not
baked, and it waits in the cold room until two in the afternoon. By then the morning has told her
most of what she needs to know. If it was slow, the dough becomes tomorrow's first batch, a bit
sourer than usual and none the worse for it. If it was busy, it goes into the oven at once. A plan
that can wait for news is worth more than a clever plan that cannot, and it costs only one shelf
in the cold room.

What strikes a visitor is how few of these rules are written down. Her two assistants learned them
by standing next to her, and when one of them ran the shop for a month in the spring, the waste
went up by half in the first week and came back to normal in the third. He said afterwards that he
had known all the rules, but not their order, and that the order was the actual
"""

CODE_C = """\
/* A ring buffer of fixed capacity for one producer and one consumer. */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

struct ring {
    size_t mask;              /* capacity - 1; the capacity is a power of two */
    _Atomic size_t head;      /* next place to write, only the producer moves it */
    _Atomic size_t tail;      /* next place to read, only the consumer moves it */
    int *items;
};

bool ring_init(struct ring *r, size_t capacity) {
    if (capacity == 0 || (capacity & (capacity - 1)) != 0) return false;
    r->items = malloc(capacity * sizeof *r->items);
    if (r->items == NULL) return false;
    r->mask = capacity - 1;
    atomic_init(&r->head, 0);
    atomic_init(&r->tail, 0);
    return true;
}

bool ring_push(struct ring *r, int item) {
    size_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    size_t tail = atomic_load_explicit(&r->tail, memory_order_acquire);
    if (head - tail > r->mask) return false;   /* full */
    r->items[head & r->mask] = item;
    atomic_store_explicit(&r->head, head + 1, memory_order_release);
    return true;
}

bool ring_pop(struct ring *r, int *item) {
"""

CODE_PYTHON = '''\
"""A tiny spreadsheet: cells hold numbers or formulas; a change recomputes what depends on it."""

import re
from collections import defaultdict, deque

CELL = re.compile(r"[A-Z]+[1-9][0-9]*")


class CycleError(ValueError):
    """Raised when a formula would depend on itself."""


class Sheet:
    def __init__(self):
        self._formulas = {}
        self._values = {}
        self._users = defaultdict(set)   # cell -> the cells whose formulas read it

    def __getitem__(self, name):
        return self._values.get(name, 0)

    def set(self, name, content):
        """Put a number, or a formula that starts with "=", into a cell."""
        for used in self._reads(name):
            self._users[used].discard(name)
        if isinstance(content, str) and content.startswith("="):
            self._formulas[name] = content[1:]
        else:
            self._formulas.pop(name, None)
            self._values[name] = content
        for used in self._reads(name):
            self._users[used].add(name)
        for cell in self._order(name):
            self._recompute(cell)

    def _reads(self, name):
        return set(CELL.findall(self._formulas.get(name, "")))

    def _order(self, start):
        """The cells that a change of `start` reaches, each after everything that it reads."""
        reached, queue = {start}, deque([start])
        while queue:
            for user in self._users[queue.popleft()]:
                if user == start:
                    raise CycleError(f"{start} depends on itself")
                if user not in reached:
                    reached.add(user)
                    queue.append(user)
        waiting = {cell: len(self._reads(cell) & reached) for cell in reached}
        waiting[start] = 0
        ready, order = deque([start]), []
        while ready:
            cell = ready.popleft()
            order.append(cell)
            for user in self._users[cell]:
                waiting[user] -= 1
                if waiting[user] == 0:
                    ready.append(user)
        return order

    def _recompute(self, name):
        if name in self._formulas:
            expression = CELL.sub(lambda m: f"self[{m.group(0)!r}]", self._formulas[name])
            self._values[name] = eval(expression, {}, {"self": self})


def test_a_change_reaches_every_cell_below():
    sheet = Sheet()
    sheet.set("A1", 2)
    sheet.set("B1", "=A1 * 10")
'''

LOG = """\
2031-04-17 06:58:02.114 pump=3 rpm=1480 flow=12.75 m3/h temp=41.2 C  status=ok
2031-04-17 06:58:07.120 pump=3 rpm=1482 flow=12.71 m3/h temp=41.9 C  status=ok
2031-04-17 06:58:12.131 pump=3 rpm=1479 flow=12.02 m3/h temp=43.6 C  status=ok
2031-04-17 06:58:17.139 pump=3 rpm=1466 flow=10.88 m3/h temp=47.3 C  status=warn
2031-04-17 06:58:22.150 pump=3 rpm=1391 flow=08.14 m3/h temp=55.0 C  status=warn
"""

RUSSIAN = """\
Осенью в посёлке остаётся мало людей. Дачники уезжают в город, закрывают ставни и оставляют ключи
у соседки, которая обещает кормить кошек. По утрам над рекой стоит туман, и лодки у причала
кажутся чужими. Старый почтальон по-прежнему приезжает на велосипеде каждый вторник, хотя писем
почти нет: газета, счёт за свет, иногда открытка с моря. Он пьёт чай на веранде, рассказывает
новости и спрашивает, не починили ли мост. Мост не починили.
"""

SPANISH = """\
Cuando llegamos al pueblo ya era de noche y la plaza estaba vacía. Mi abuela nos esperaba en la
puerta con una lámpara en la mano, como si el viaje hubiera durado años y no unas pocas horas.
Sobre la mesa había pan, queso y una jarra de agua fría. «Mañana», dijo, «os enseñaré el camino
que sube a la montaña, pero hay que salir antes de que el sol caliente las piedras».
"""

CZECH = """\
Na konci ulice stál starý dům, o kterém se říkalo, že v něm nikdo nebydlí. Každé úterý se však
v jednom z oken rozsvítilo světlo a někdo hrál na klavír, pomalu a s chybami, jako když se učí
dítě. Příští týden jsme zazvonili. Otevřel nám muž v zástěře, omluvil se za hluk a řekl, že ladí
nástroje pro školu a doma na ně nemá místo.
"""

JAPANESE = """\
駅前の小さな本屋は、毎朝八時に店を開ける。店主は店の前を掃いて、新しい本を棚に並べる。\
学校へ行く子どもたちが「おはようございます」と声をかけると、彼は、いつも笑って手を上げて答える。雨の日は客が少ない。
"""
