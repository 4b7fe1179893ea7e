/** The panel of versions: a table, the rollout with its evidence, and what was decided last. */

import { formatNumber, formatSeconds, formatShare, partOfThreshold } from "./series.js";

const NUM_DECISIONS = 8;
const TONES = { promoted: "good", rolled_back: "bad", failed: "bad", loading: "warn", canary: "warn" };
const SHOWN_CHARACTERS = 12; // of a version

const byId = (id) => document.getElementById(id);

/** There is nothing to say while one version answers and nothing was ever decided. */
export function showVersions({ versions, rollout, decisions }) {
  const isShown = versions.length > 1 || rollout !== null || decisions.length > 0;
  byId("versions").hidden = !isShown;
  if (!isShown) return;
  showState(rollout, versions);
  byId("versions-rows").replaceChildren(...versions.map(rowOf));
  byId("versions-evidence").replaceChildren(...(rollout?.evidence ?? []).map(barOf));
  byId("versions-decisions").replaceChildren(...decisions.slice(-NUM_DECISIONS).reverse().map(lineOf));
}

function showState(rollout, versions) {
  const node = byId("versions-state");
  node.hidden = rollout === null;
  if (rollout === null) return;
  node.dataset.tone = TONES[rollout.phase] ?? "plain";
  const text = stateText(rollout, versions);
  if (node.textContent !== text) node.textContent = text;
}

/** How a rollout stands, in words. */
function stateText(rollout, versions) {
  const { phase, version, share, stage, num_stages: numStages } = rollout;
  const name = `${shown(version)} ${phase.replaceAll("_", " ")}`;
  const doing = versions.find((card) => card.role === "loading")?.progress.replace(/: $/, "");
  if (phase === "loading") return doing ? `${shown(version)} ${doing}` : name;
  if (phase !== "canary") return name;
  return `${name} at ${formatShare(share)}${numStages > 1 ? `, stage ${stage + 1} of ${numStages}` : ""}`;
}

function rowOf(card) {
  const row = document.createElement("tr");
  row.dataset.role = card.role;
  const name = element("th", shown(card.version));
  name.scope = "row";
  name.title = `${card.version} from ${card.root}`;
  const texts = [
    card.role, formatShare(card.share), formatNumber(card.requests), formatNumber(card.errors),
    formatSeconds(card.ttft_s), formatNumber(card.tokens_per_s), formatNumber(card.open_calls),
  ];
  row.append(name, ...texts.map((text) => element("td", text)));
  return row;
}

/** The logarithm of an e-value against the threshold at which the version is rolled back. */
function barOf({ name, unit, e_value: value, threshold: limit, canary, stable }) {
  const threshold = limit ?? Infinity; // no number is enough
  const part = partOfThreshold(value, threshold);
  const item = document.createElement("li");
  const bar = element("div", "");
  bar.className = "evidence";
  const attributes = { role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 1, "aria-valuenow": part };
  for (const [key, text] of Object.entries(attributes)) bar.setAttribute(key, text);
  bar.dataset.tone = part >= 1 ? "bad" : part >= 0.5 ? "warn" : "good";
  bar.appendChild(element("div", "")).style.width = `${100 * part}%`;
  const means = [canary, stable].filter((mean) => mean !== null).map((mean) => Number(mean.toPrecision(3)));
  item.title = means.length ? `${means.join(" beside ")} ${unit}` : "nothing to compare yet";
  item.append(element("span", name.replaceAll("_", " ")), bar, element("span", `${short(value)} of ${short(threshold)}`));
  return item;
}

function lineOf({ at, kind, version, by, reason }) {
  const item = document.createElement("li");
  const when = element("time", new Date(at).toLocaleTimeString());
  when.dateTime = at;
  const what = `${shown(version)} ${kind.replaceAll("_", " ")} by ${by}`;
  item.append(when, element("b", what), element("span", reason));
  return item;
}

function short(eValue) {
  if (eValue === Infinity) return "∞";
  return eValue < 1e5 ? formatNumber(eValue) : eValue.toExponential(0);
}

function shown(version) {
  return version.slice(0, SHOWN_CHARACTERS);
}

function element(name, text) {
  const node = document.createElement(name);
  node.textContent = text;
  return node;
}
