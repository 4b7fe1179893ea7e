/** The box that tries a chat: streams an answer, stops it, tells how fast it came. */

import { formatSeconds } from "./series.js";

const byId = (id) => document.getElementById(id);

export class Chat {
  /** headers() gives those of the key; onUnauthorized() is called when a key is needed. */
  constructor({ headers, onUnauthorized }) {
    this.headers = headers;
    this.onUnauthorized = onUnauthorized;
    this.model = null;
    this.messages = [];
    this.running = null; // AbortController of the answer that comes in
    this.isReady = false;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("chat-input").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("chat-form").requestSubmit();
    });
    byId("chat-stop").addEventListener("click", () => this.running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  /** Whether the server takes requests, and as which model. */
  update(isReady, model) {
    this.isReady = isReady;
    this.model = model;
    this.showButtons();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    byId("chat-log").replaceChildren();
    byId("chat-input").focus();
  }

  async send() {
    const content = byId("chat-input").value.trim();
    if (!content || this.running || !this.isReady) return;
    byId("chat-input").value = "";
    byId("chat-log").querySelector(".empty")?.remove();
    this.messages.push({ role: "user", content });
    this.show("user", content);
    this.running = new AbortController();
    this.showButtons();
    const answer = new Answer(this.show("assistant", ""));
    try {
      await this.stream(answer);
    } catch (error) {
      if (error.name === "AbortError") answer.end = "stopped";
      else this.show("error", error.message);
    }
    this.finish(answer);
  }

  async stream(answer) {
    const asked = performance.now();
    const reply = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...this.headers() },
      body: JSON.stringify(this.body()),
      signal: this.running.signal,
    });
    if (!reply.ok) throw await this.refusal(reply);
    answer.begin(asked);
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      answer.add(event);
      scrollToEnd();
    }
  }

  body() {
    return {
      model: this.model,
      messages: this.messages,
      temperature: Number(byId("chat-temperature").value),
      max_tokens: Number(byId("chat-max-tokens").value),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  async refusal(reply) {
    if (reply.status === 401) this.onUnauthorized();
    const body = await reply.json().catch(() => null);
    const wait = reply.headers.get("retry-after");
    const text = body?.error?.message ?? `the server answered ${reply.status}`;
    return new Error(wait ? `${text} (try again in ${wait} s)` : text);
  }

  finish(answer) {
    this.running = null;
    this.showButtons();
    if (answer.text) {
      this.messages.push({ role: "assistant", content: answer.text });
      byId("chat-log").appendChild(answer.stats());
    } else {
      answer.node.remove();
      byId("chat-input").value ||= this.messages.pop().content; // to be sent again
    }
    scrollToEnd();
  }

  show(role, content) {
    const node = document.createElement("div");
    node.className = "message";
    node.dataset.role = role;
    node.textContent = content;
    byId("chat-log").appendChild(node);
    scrollToEnd();
    return node;
  }

  showButtons() {
    const hadFocus = document.activeElement === byId("chat-stop");
    byId("chat-stop").hidden = !this.running;
    byId("chat-send").hidden = Boolean(this.running);
    byId("chat-send").disabled = !this.isReady;
    if (hadFocus && !this.running) byId("chat-input").focus();
  }
}

/** An answer as it comes in. */
class Answer {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.numTokens = 0;
    this.first = null; // milliseconds
    this.last = null;
    this.end = null;
  }

  begin(asked) {
    this.asked = asked;
  }

  add(event) {
    if (event.usage) this.numTokens = event.usage.completion_tokens;
    const choice = event.choices?.[0];
    if (!choice) return;
    this.end = choice.finish_reason ?? this.end;
    if (!choice.delta?.content) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.text += choice.delta.content;
    this.numTokens += 1; // until the usage tells
    this.node.textContent = this.text;
  }

  stats() {
    const node = document.createElement("p");
    node.className = "stats";
    const seconds = (this.last - this.first) / 1000;
    const speed = seconds > 0 ? `${((this.numTokens - 1) / seconds).toFixed(1)} tok/s` : null;
    const parts = [`first token ${formatSeconds((this.first - this.asked) / 1000)}`, speed];
    parts.push(`${this.numTokens} tokens`, this.end === "length" ? "cut at max tokens" : this.end);
    node.textContent = parts.filter(Boolean).join(" · ");
    return node;
  }
}

/** The JSON of each server-sent event, until [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").find((line) => line.startsWith("data:"));
      if (data === "data: [DONE]") return;
      if (data) yield JSON.parse(data.slice(5));
    }
  }
}

function scrollToEnd() {
  const log = byId("chat-log");
  log.scrollTop = log.scrollHeight;
}
