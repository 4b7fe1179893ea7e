/** Asks the server for its numbers once a second and shows them. */

import { BarChart, TimeChart } from "./chart.js";
import { Chat } from "./chat.js";
import {
  formatBytes, formatDuration, formatNumber, formatSeconds, formatShare, History, quantile, RECENT_S, share, sum,
} from "./series.js";
import { showVersions } from "./versions.js";

const EVERY_MS = 1000;
const AWAY_MS = 4000; // between two tries while nobody answers
const PATIENCE_MS = 5000;

const byId = (id) => document.getElementById(id);
const history = new History();
const speed = (value) => (value === null ? "–" : `${formatNumber(value)} tok/s`);

let key = ""; // never stored
let timer = null;

const chat = new Chat({ headers, onUnauthorized: askForKey });
const tiles = makeTiles();
const charts = makeCharts();

function makeTiles() {
  const of = (label) => {
    const card = byId("tiles").appendChild(document.createElement("div"));
    card.className = "card";
    return ["label", "value", "detail"].map((name) => {
      const node = card.appendChild(document.createElement("div"));
      node.className = name;
      if (name === "label") node.textContent = label;
      if (name === "value") node.textContent = "–";
      return node;
    });
  };
  return {
    generation: of("Generation"),
    prompt: of("Prompt"),
    first: of("First token (p50)"),
    requests: of("Running"),
    pool: of("KV pool used"),
    memory: of("Resident memory"),
  };
}

function makeCharts() {
  const parent = byId("charts");
  const of = (title, format, least, series, isStacked = false) =>
    new TimeChart(parent, { title, format, least, isStacked, series });
  const one = (label, ink, value) => ({ label, ink, value });
  const kind = (label, ink, name) => one(label, ink, (v) => v.memory[name]);
  return {
    time: [
      of("First-token latency", formatSeconds, 0.1, [
        one("p50", "a", (v) => v.firstToken[0]), one("p99", "b", (v) => v.firstToken[1]),
      ]),
      of("Time between tokens", formatSeconds, 0.02, [
        one("p50", "a", (v) => v.gap[0]), one("p99", "b", (v) => v.gap[1]),
      ]),
      of("Generation speed", speed, 10, [one("generated", "a", (v) => v.generationSpeed)]),
      of("Prompt speed", speed, 10, [one("computed", "c", (v) => v.promptSpeed)]),
      of("Requests", formatNumber, 4, [
        one("running", "a", (v) => v.running), one("waiting", "b", (v) => v.waiting),
        one("refused per s", "d", (v) => v.refused),
      ]),
      of("Padding and prefix cache", formatShare, 0.1, [
        one("padding waste", "b", (v) => v.padding), one("prefix hits", "c", (v) => v.prefixHits),
      ]),
      of("KV pool", formatBytes, 2 ** 20, [
        kind("used", "a", "kv_used"), kind("cached", "c", "kv_cached"), kind("free", "rest", "kv_free"),
      ], true),
      of("Memory by kind", formatBytes, 2 ** 20, [
        kind("weights", "a", "weights"), kind("programs", "d", "programs"),
        kind("KV pool", "c", "kv_pool"), kind("process", "b", "process"),
      ], true),
    ],
    prompts: new BarChart(parent, { title: "Prompt lengths since the start", label: "prompts", ink: "c" }),
    outputs: new BarChart(parent, { title: "Output lengths since the start", label: "answers", ink: "a" }),
  };
}

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function poll() {
  let wait = EVERY_MS;
  try {
    const reply = await fetch("dashboard/data", { headers: headers(), signal: AbortSignal.timeout(PATIENCE_MS) });
    if (reply.status === 401) return askForKey();
    if (!reply.ok) throw new Error(`answer ${reply.status}`);
    show(await reply.json());
  } catch (error) {
    showAway(error);
    wait = AWAY_MS;
  }
  again(wait);
}

function again(wait) {
  clearTimeout(timer);
  timer = document.hidden ? null : setTimeout(poll, wait);
}

function show({ server, metrics, versions }) {
  byId("key-form").hidden = true;
  if (history.last && server.uptime_s <= history.last.time) history.clear(); // it was restarted
  history.push(server.uptime_s, read(metrics, server.uptime_s));
  const values = history.last.values;
  showState(server, metrics, versions.pause);
  showTiles(values, metrics, server);
  for (const chart of charts.time) chart.draw(history);
  charts.prompts.draw(metrics.request_prompt_tokens);
  charts.outputs.draw(metrics.request_generation_tokens);
  showNotes(metrics);
  showVersions(versions);
  chat.update(server.phase === "ready" && !server.ailment, server.models[0] ?? null);
}

/** What charts show, from the counts of now and of a while ago. */
function read(metrics, time) {
  const before = history.last ? history.before(RECENT_S).values.raw : metrics;
  const since = (name) => metrics[name] - before[name];
  const percentiles = (name) => [0.5, 0.99].map((q) => quantile(metrics[name], before[name], q));
  return {
    raw: metrics,
    firstToken: percentiles("time_to_first_token_seconds"),
    gap: percentiles("inter_token_latency_seconds"),
    generationSpeed: metrics.generation_tokens_per_second,
    promptSpeed: metrics.prompt_tokens_per_second,
    running: metrics.num_requests_running,
    waiting: metrics.num_requests_waiting,
    refused: refusedPerSecond(metrics, time),
    padding: metrics.padding_waste_ratio,
    prefixHits: share(since("prefix_cache_hits"), since("prefix_cache_queries")),
    memory: metrics.memory_bytes,
  };
}

function refusedPerSecond(metrics, time) {
  const last = history.last;
  if (!last) return 0;
  return (sum(metrics.rejected) - sum(last.values.raw.rejected)) / (time - last.time);
}

function showTiles(values, metrics, server) {
  const set = ([, value, detail], text, more, unit = "") => {
    value.textContent = text;
    if (unit) value.appendChild(document.createElement("small")).textContent = ` ${unit}`;
    detail.textContent = more;
  };
  const { memory } = values;
  set(tiles.generation, formatNumber(values.generationSpeed), `${formatNumber(metrics.generation_tokens)} tokens in all`, "tok/s");
  set(tiles.prompt, formatNumber(values.promptSpeed), `${formatNumber(metrics.prompt_tokens)} tokens in all`, "tok/s");
  set(tiles.first, formatSeconds(values.firstToken[0]), `p99 ${formatSeconds(values.firstToken[1])}, last ${RECENT_S} s`);
  set(tiles.requests, formatNumber(values.running), `${formatNumber(values.waiting)} waiting`);
  const pool = share(memory.kv_used, memory.kv_pool);
  set(tiles.pool, formatShare(pool), `${formatShare(share(memory.kv_cached, memory.kv_pool))} cached`);
  set(tiles.memory, formatBytes(memory.host_rss), `peak ${formatBytes(memory.host_rss_peak)}`);
  byId("uptime").textContent = `Up ${formatDuration(server.uptime_s)}`;
}

function showState(server, metrics, pause) {
  const phases = { ready: ["ready", "good"], loading: ["loading", "warn"], draining: ["draining", "warn"] };
  badge("phase", ...(server.ailment ? ["unhealthy", "bad"] : phases[server.phase]));
  const breaker = breakerState(metrics.circuit_breaker_state);
  badge("breaker", breaker && `breaker ${breaker}`, { closed: "good", open: "bad" }[breaker] ?? "warn");
  const grows = metrics.memory_growth_alarm > 0;
  badge("growth", server.phase === "loading" ? null : grows ? "memory grows" : "memory steady", grows ? "bad" : "good");
  badge("version", `v${server.version}`, "plain");
  const weights = metrics.weights_version?.version;
  const names = server.models.join(", ") || "no model yet";
  byId("model").textContent = weights ? `${names} · weights ${weights.slice(0, 12)} · context ${formatNumber(server.max_model_len)}` : names;
  notice(...stateNotice(server, pause));
}

function stateNotice({ phase, progress, ailment }, pause) {
  if (ailment) return [`Unhealthy: ${ailment}`, "bad"];
  if (phase === "loading") return [`Loading: ${progress}`, "warn"];
  if (phase === "draining") return ["The server shuts down: open requests end, new ones are refused.", "warn"];
  return pause ? [`New calls wait: ${pause}.`, "warn"] : ["", ""];
}

/** One gauge per state, or a number: 0 closed, 1 half-open, 2 open. */
function breakerState(state) {
  if (state === undefined) return null;
  if (typeof state === "number") return ["closed", "half-open", "open"][state] ?? null;
  return Object.keys(state).find((name) => state[name] > 0)?.replace("_", "-") ?? null;
}

/** What there is to say about requests besides the curves. */
function showNotes(metrics) {
  const { note } = charts.time.find((chart) => chart.title === "Requests");
  const paused = metrics.num_requests_paused;
  const parts = [
    listed("Waiting by class", metrics.queue_depth),
    paused > 0 ? `Paused for slow readers: ${formatNumber(paused)}` : "",
    listed("Refused since the start", metrics.rejected),
  ].filter(Boolean);
  note.hidden = !parts.length;
  note.textContent = parts.join(". ");
}

function listed(title, byLabel) {
  const found = Object.entries(byLabel ?? {}).filter(([, number]) => number > 0);
  const texts = found.map(([label, number]) => `${label.replaceAll("_", " ")} ${formatNumber(number)}`);
  return texts.length ? `${title}: ${texts.join(", ")}` : "";
}

function showAway(error) {
  badge("phase", "away", "bad");
  notice(`No answer from the server (${error.name === "TimeoutError" ? "it takes too long" : error.message}); trying again.`, "bad");
  chat.update(false, null);
}

function askForKey() {
  clearTimeout(timer);
  if (key) notice("The server does not know this key.", "bad");
  else notice("", "");
  key = "";
  badge("phase", "needs a key", "warn");
  byId("key-form").hidden = false;
  byId("key").focus();
}

function badge(id, text, tone) {
  const node = byId(id);
  node.hidden = !text;
  if (!text) return;
  if (node.textContent !== text) node.textContent = text;
  node.dataset.tone = tone;
}

function notice(text, tone) {
  const node = byId("notice");
  node.hidden = !text;
  node.dataset.tone = tone;
  if (node.textContent !== text) node.textContent = text;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  poll();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && byId("key-form").hidden) poll();
  else clearTimeout(timer);
});
new ResizeObserver(() => {
  if (history.last) for (const chart of charts.time) chart.draw(history);
}).observe(byId("charts"));
poll();
