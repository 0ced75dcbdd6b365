/** Looks at the server's counters once a second, while somebody can see the monitor. */

import { useEffect, useState } from "preact/hooks";
import { type Client, ServerError } from "../server/client.ts";
import { type Snapshot, snapshotOf } from "./metrics.ts";
import { withLook } from "./rates.ts";
import { type Slot, busySlots } from "./slots.ts";

const PERIOD_MS = 1000;

export interface Watch {
  looks: Snapshot[];
  /** null where the server has no such list. */
  slots: Slot[] | null;
  /** Why there are no new figures; empty while there are. */
  problem: string;
}

export function useWatch(client: Client): Watch {
  const [watch, setWatch] = useState<Watch>({ looks: [], slots: [], problem: "" });
  useEffect(() => {
    let listed = true;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const controller = new AbortController();
    const look = async () => {
      try {
        const { signal } = controller;
        const text = await (await client.request("metrics", { signal }, { quiet: true })).text();
        const snapshot = snapshotOf(text, Date.now());
        const slots = listed ? await slotsOf(client, signal) : null;
        listed = slots !== null;
        setWatch((before) => ({ looks: withLook(before.looks, snapshot), slots, problem: "" }));
      } catch (error) {
        if (controller.signal.aborted) return;
        setWatch((before) => ({ ...before, problem: reasonOf(error) }));
      }
      timer = setTimeout(next, PERIOD_MS);
    };
    const next = () => {
      if (!document.hidden) void look();
      else timer = setTimeout(next, PERIOD_MS);
    };
    next();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [client]);
  return watch;
}

/** null for a server without the list. */
async function slotsOf(client: Client, signal: AbortSignal): Promise<Slot[] | null> {
  try {
    return busySlots(await (await client.request("slots", { signal }, { quiet: true })).json());
  } catch (error) {
    if (error instanceof ServerError && [404, 405, 501].includes(error.status)) return null;
    throw error;
  }
}

function reasonOf(error: unknown): string {
  if (!(error instanceof ServerError)) return "The server cannot be reached.";
  return error.status === 401 ? "The server wants its key." : error.message;
}
