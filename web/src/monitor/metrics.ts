/** Prometheus text to the figures of the monitor. Names that a server lacks are null, never an error. */

export interface Sample {
  /** Without the prefix before a colon. */
  name: string;
  labels: Record<string, string>;
  value: number;
}

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

export function parseMetrics(text: string): Sample[] {
  const samples: Sample[] = [];
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels: Record<string, string> = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(LABEL)) labels[key!] = value!.replace(/\\(.)/g, "$1");
    samples.push({ name: match[1]!.replace(/^.*:/, ""), labels, value: prometheusNumber(match[3]!) });
  }
  return samples;
}

function prometheusNumber(text: string): number {
  if (/^[+-]?inf$/i.test(text)) return text.startsWith("-") ? -Infinity : Infinity;
  return Number(text);
}

/** Counters and gauges at one moment; null where the server does not report one. */
export interface Snapshot {
  atMs: number;
  promptTokens: number | null;
  promptSeconds: number | null;
  replyTokens: number | null;
  replySeconds: number | null;
  running: number | null;
  waiting: number | null;
  requests: number | null;
  sessionTokens: number | null;
  kvShare: number | null;
  cachedTokens: number | null;
  hitsRam: number | null;
  hitsDisk: number | null;
  misses: number | null;
  cacheEntries: number | null;
  cacheRamBytes: number | null;
  cacheDiskBytes: number | null;
  draftTokens: number | null;
  draftAccepted: number | null;
  residentBytes: number | null;
  gpuBytes: number | null;
  firstTokenSeconds: number | null;
  firstTokenCount: number | null;
}

export function snapshotOf(text: string, atMs: number): Snapshot {
  const sums = new Map<string, number>();
  for (const { name, value } of parseMetrics(text)) {
    if (Number.isFinite(value)) sums.set(name, (sums.get(name) ?? 0) + value);
  }
  const first = (...names: string[]): number | null => {
    const name = names.find((candidate) => sums.has(candidate));
    return name === undefined ? null : sums.get(name)!;
  };
  return {
    atMs,
    promptTokens: first("prompt_tokens_total"),
    promptSeconds: first("prompt_seconds_total"),
    replyTokens: first("tokens_predicted_total"),
    replySeconds: first("tokens_predicted_seconds_total"),
    running: first("requests_processing"),
    waiting: first("requests_deferred"),
    requests: first("requests_total"),
    sessionTokens: first("kv_cache_tokens"),
    kvShare: first("kv_cache_usage_ratio"),
    cachedTokens: first("prompt_tokens_cached_total"),
    hitsRam: first("cache_hits_ram_total"),
    hitsDisk: first("cache_hits_disk_total"),
    misses: first("cache_misses_total"),
    cacheEntries: first("cache_entries"),
    cacheRamBytes: first("cache_ram_bytes"),
    cacheDiskBytes: first("cache_disk_bytes"),
    draftTokens: first("spec_decode_num_draft_tokens_total"),
    draftAccepted: first("spec_decode_num_accepted_tokens_total"),
    residentBytes: first("process_resident_memory_bytes"),
    gpuBytes: first("device_memory_bytes"),
    firstTokenSeconds: first("time_to_first_token_seconds_sum"),
    firstTokenCount: first("time_to_first_token_seconds_count"),
  };
}
