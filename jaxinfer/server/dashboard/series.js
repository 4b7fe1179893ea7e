/** Numbers over time, and what is worked out from the counts of the server. No page here. */

export const SPAN_S = 180; // that charts show
export const RECENT_S = 15; // over which percentiles and shares are taken

/** The samples of the last minutes, oldest first: {time, values}. Times are the server's, since its start. */
export class History {
  constructor() {
    this.samples = [];
  }

  get last() {
    return this.samples.at(-1);
  }

  clear() {
    this.samples = [];
  }

  push(time, values) {
    this.samples.push({ time, values });
    while (this.samples[0].time < time - SPAN_S - RECENT_S) this.samples.shift();
  }

  /** The newest sample that is at least `seconds` older than the last one, else the oldest. */
  before(seconds) {
    const until = this.last.time - seconds;
    return this.samples.findLast((s) => s.time <= until) ?? this.samples[0];
  }
}

/** A quantile of what a histogram has counted between two of its states; null if nothing. */
export function quantile(now, before, q) {
  const counts = now.counts.map((n, i) => n - (before?.counts[i] ?? 0));
  const total = counts.reduce((a, b) => a + b, 0);
  if (total <= 0) return null;
  let left = q * total;
  for (let i = 0; i < counts.length; i++) {
    if (left <= counts[i] && counts[i] > 0) {
      const low = i ? now.bounds[i - 1] : 0;
      const high = now.bounds[i] ?? low; // above all bounds: the last of them
      return low + ((high - low) * left) / counts[i];
    }
    left -= counts[i];
  }
  return now.bounds.at(-1);
}

export function sum(byLabel) {
  return Object.values(byLabel ?? {}).reduce((a, b) => a + b, 0);
}

/** A share of two counters since then; null if the second did not move. */
export function share(part, whole) {
  return whole > 0 ? part / whole : null;
}

/** How far an e-value has come to its threshold, 0 to 1, by their logarithms. */
export function partOfThreshold(eValue, threshold) {
  if (eValue >= threshold) return 1;
  return eValue > 1 ? Math.log(eValue) / Math.log(threshold) : 0;
}

export function formatSeconds(value) {
  if (value === null) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  return value < 0.9995 ? `${Math.round(value * 1000)} ms` : `${Number(value.toPrecision(3))} s`;
}

export function formatNumber(value) {
  if (value === null) return "–";
  return value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toLocaleString("en-US");
}

export function formatShare(value) {
  if (value === null) return "–";
  const percent = value * 100;
  return `${percent < 10 && percent % 1 ? percent.toFixed(1) : Math.round(percent)} %`;
}

export function formatBytes(value) {
  if (value === null) return "–";
  if (value > 0 && value < 2 ** 20) return `${Math.ceil(value / 1024)} KiB`;
  const mib = value / 2 ** 20;
  return mib < 1000 ? `${mib.toFixed(mib < 10 && mib % 1 ? 1 : 0)} MiB` : `${Number((mib / 1024).toFixed(2))} GiB`;
}

export function formatDuration(seconds) {
  const days = Math.floor(seconds / 86400);
  const hours = Math.floor((seconds % 86400) / 3600);
  const minutes = Math.floor((seconds % 3600) / 60);
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}
