/** One streamed chat completion: the request that is sent and the events that come back. */

import type { Message, Settings } from "../state/types.ts";
import { type Client, ServerError } from "./client.ts";
import { eventData } from "./sse.ts";

/** Figures of a finished reply, from the server's `timings`. */
export interface Figures {
  promptTokens: number;
  cachedTokens: number;
  promptPerS: number;
  replyTokens: number;
  replyPerS: number;
  draftTokens: number;
  draftAccepted: number;
}

export type ReplyPart =
  | { kind: "id"; requestId: string }
  | { kind: "progress"; share: number }
  | { kind: "thought" | "text"; text: string }
  | { kind: "call"; index: number; name: string; json: string }
  | { kind: "end"; reason: string; figures: Figures | null };

type Part = { type: "text"; text: string } | { type: "image_url"; image_url: { url: string } };

/** The body of the request; a setting that is null is left to the server. */
export function chatBody(messages: readonly Message[], settings: Settings): Record<string, unknown> {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body: Record<string, unknown> = {
    messages: [...system, ...messages.filter(isSent).map(wireMessage)],
    stream: true,
    return_progress: true,
  };
  if (settings.temperature !== null) body.temperature = settings.temperature;
  if (settings.topP !== null) body.top_p = settings.topP;
  if (settings.maxTokens !== null) body.max_tokens = settings.maxTokens;
  if (settings.thinking === "off") body.enable_thinking = false;
  else if (settings.thinking === "on") body.enable_thinking = true;
  else if (settings.thinking !== "default") body.reasoning_effort = settings.thinking;
  return body;
}

/** A reply that was stopped before its first word says nothing, and the template would show it. */
function isSent(message: Message): boolean {
  return message.role === "user" || message.text !== "";
}

function wireMessage(message: Message): Record<string, unknown> {
  if (message.role === "assistant") {
    const thought = message.thought ? { reasoning_content: message.thought } : {};
    return { role: "assistant", content: message.text, ...thought };
  }
  if (!message.pictures.length) return { role: "user", content: message.text };
  const parts: Part[] = message.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  if (message.text) parts.push({ type: "text", text: message.text });
  return { role: "user", content: parts };
}

/** Sends the conversation and yields the parts of the reply. Throws ServerError, or AbortError on `signal`. */
export async function* streamReply(
  client: Client,
  body: Record<string, unknown>,
  signal: AbortSignal,
): AsyncGenerator<ReplyPart> {
  const response = await client.request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  yield { kind: "id", requestId: response.headers.get("X-Request-ID") ?? "" };
  let ended = false;
  for await (const data of eventData(response.body!)) {
    if (data === "[DONE]") return;
    for (const part of partsOf(JSON.parse(data) as Chunk)) {
      ended ||= part.kind === "end";
      yield part;
    }
  }
  if (!ended) throw new ServerError("The connection ended before the reply did.", 0);
}

interface Chunk {
  error?: { message?: string };
  choices?: { delta?: Delta; finish_reason?: string | null }[];
  prompt_progress?: { total: number; processed: number };
  timings?: Record<string, number>;
}

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; function?: { name?: string; arguments?: string } }[];
}

/** What one chunk of the stream says. Throws ServerError where it carries an error. */
export function partsOf(chunk: Chunk): ReplyPart[] {
  if (chunk.error) throw new ServerError(chunk.error.message ?? "The reply failed.", 200);
  const parts: ReplyPart[] = [];
  const progress = chunk.prompt_progress;
  if (progress) parts.push({ kind: "progress", share: progress.total ? progress.processed / progress.total : 1 });
  const choice = chunk.choices?.[0];
  if (choice?.delta?.reasoning_content) parts.push({ kind: "thought", text: choice.delta.reasoning_content });
  if (choice?.delta?.content) parts.push({ kind: "text", text: choice.delta.content });
  for (const call of choice?.delta?.tool_calls ?? []) {
    const { name = "", arguments: json = "" } = call.function ?? {};
    parts.push({ kind: "call", index: call.index, name, json });
  }
  if (choice?.finish_reason) {
    parts.push({ kind: "end", reason: choice.finish_reason, figures: chunk.timings ? figuresOf(chunk.timings) : null });
  }
  return parts;
}

function figuresOf(timings: Record<string, number>): Figures {
  return {
    promptTokens: (timings.prompt_n ?? 0) + (timings.cache_n ?? 0),
    cachedTokens: timings.cache_n ?? 0,
    promptPerS: timings.prompt_per_second ?? 0,
    replyTokens: timings.predicted_n ?? 0,
    replyPerS: timings.predicted_per_second ?? 0,
    draftTokens: timings.draft_n ?? 0,
    draftAccepted: timings.draft_n_accepted ?? 0,
  };
}
