/** What /slots says of the requests that run; entries that are not as expected are left out. */

export interface Slot {
  id: string;
  state: string;
  promptTokens: number;
  promptDone: number;
  replyTokens: number;
}

export function busySlots(payload: unknown): Slot[] {
  if (!Array.isArray(payload)) return [];
  return (payload as unknown[]).flatMap((entry) => {
    const slot = record(entry);
    if (!slot || slot.is_processing !== true) return [];
    const next = Array.isArray(slot.next_token) ? record(slot.next_token[0]) : null;
    return [
      {
        id: String(slot.request_id ?? slot.id ?? ""),
        state: typeof slot.state === "string" ? slot.state : "running",
        promptTokens: count(slot.n_prompt_tokens),
        promptDone: count(slot.n_prompt_tokens_processed) + count(slot.n_prompt_tokens_cache),
        replyTokens: count(next?.n_decoded),
      },
    ];
  });
}

function record(value: unknown): Record<string, unknown> | null {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : null;
}

function count(value: unknown): number {
  return typeof value === "number" && Number.isFinite(value) ? value : 0;
}
