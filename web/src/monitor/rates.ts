/** What happened between two looks at the counters. */

import type { Snapshot } from "./metrics.ts";

type Counter = {
  [K in keyof Snapshot]-?: Snapshot[K] extends number | null ? K : never;
}[keyof Snapshot];

/** Looks kept: two minutes at one a second. */
export const KEPT = 120;

/** The looks that belong to one run of the server, with one more; a counter that fell means a restart. */
export function withLook(looks: readonly Snapshot[], look: Snapshot): Snapshot[] {
  const last = looks.at(-1);
  const restarted = last && (fell(last, look, "promptTokens") || fell(last, look, "replyTokens"));
  return [...(restarted ? [] : looks), look].slice(-KEPT);
}

/** Growth of a counter, null where one of the two looks lacks it. */
export function growth(from: Snapshot, to: Snapshot, counter: Counter): number | null {
  const before = from[counter];
  const after = to[counter];
  return before === null || after === null ? null : Math.max(0, after - before);
}

/** Growth a second of the clock, for each pair of neighbours: what a sparkline shows. */
export function perSecond(looks: readonly Snapshot[], counter: Counter): number[] {
  return looks.slice(1).map((look, index) => {
    const seconds = (look.atMs - looks[index]!.atMs) / 1000;
    return seconds > 0 ? (growth(looks[index]!, look, counter) ?? 0) / seconds : 0;
  });
}

/** Growth of one counter for each unit of another over all looks; null while the other stands still. */
export function ratio(looks: readonly Snapshot[], above: Counter, below: Counter): number | null {
  const first = looks[0];
  const last = looks.at(-1);
  if (!first || !last) return null;
  const amount = growth(first, last, above);
  const by = growth(first, last, below);
  return amount === null || !by ? null : amount / by;
}

/** Share of one counter in another since the server began; null while there is nothing to share. */
export function share(part: number | null, whole: number | null): number | null {
  return part === null || !whole ? null : part / whole;
}

function fell(from: Snapshot, to: Snapshot, counter: Counter): boolean {
  const before = from[counter];
  const after = to[counter];
  return before !== null && after !== null && after < before;
}
