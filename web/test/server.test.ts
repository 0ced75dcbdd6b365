import assert from "node:assert/strict";
import { test } from "node:test";
import { parseMetrics, snapshotOf } from "../src/monitor/metrics.ts";
import { perSecond, ratio, share, withLook } from "../src/monitor/rates.ts";
import { busySlots } from "../src/monitor/slots.ts";
import { chatBody, partsOf } from "../src/server/reply.ts";
import { EventParser, eventData } from "../src/server/sse.ts";
import { checked } from "../src/state/settings.ts";
import { DEFAULTS, type Message } from "../src/state/types.ts";

const STREAM = ": ping\r\n\r\ndata: {\"a\": \"ä🌍\"}\n\nevent: x\ndata: one\ndata: two\n\ndata: [DONE]\n\ndata: cut off";

test("events are the same however the stream is cut", async () => {
  const wanted = ['{"a": "ä🌍"}', "one\ntwo", "[DONE]"];
  for (const size of [1, 2, 3, 7, 1000]) {
    const parser = new EventParser();
    const found: string[] = [];
    for (let at = 0; at < STREAM.length; at += size) found.push(...parser.feed(STREAM.slice(at, at + size)));
    assert.deepEqual(found, wanted);
    const raw = new TextEncoder().encode(STREAM);
    const body = new ReadableStream<Uint8Array>({
      start(controller) {
        for (let at = 0; at < raw.length; at += size) controller.enqueue(raw.slice(at, at + size));
        controller.close();
      },
    });
    const read: string[] = [];
    for await (const data of eventData(body)) read.push(data);
    assert.deepEqual(read, wanted);
  }
});

test("chunks become parts, an error in the stream is thrown", () => {
  const delta = (value: object) => ({ choices: [{ delta: value, finish_reason: null }] });
  assert.deepEqual(partsOf(delta({ role: "assistant", content: "" })), []);
  assert.deepEqual(partsOf(delta({ reasoning_content: "hm" })), [{ kind: "thought", text: "hm" }]);
  assert.deepEqual(partsOf(delta({ content: "42" })), [{ kind: "text", text: "42" }]);
  assert.deepEqual(partsOf({ ...delta({}), prompt_progress: { total: 200, processed: 50 } }), [{ kind: "progress", share: 0.25 }]);
  assert.deepEqual(partsOf({ choices: [], prompt_progress: { total: 0, processed: 0 } }), [{ kind: "progress", share: 1 }]);
  const [end] = partsOf({ choices: [{ delta: {}, finish_reason: "stop" }], timings: { prompt_n: 3, cache_n: 4, predicted_n: 5 } });
  assert.ok(end?.kind === "end" && end.figures?.promptTokens === 7 && end.figures.replyTokens === 5);
  assert.throws(() => partsOf({ error: { message: "The server is closing." } }), /closing/);
});

function message(change: Partial<Message>): Message {
  return { id: "1", role: "user", text: "", thought: "", thoughtMs: null, pictures: [], calls: [], ending: "done", error: "", figures: null, ...change };
}

test("only what the person set is sent, and replies that say nothing are not", () => {
  const messages = [
    message({ text: "look", pictures: ["data:image/png;base64,AA"] }),
    message({ role: "assistant", text: "red", thought: "a circle" }),
    message({ role: "assistant", ending: "stopped", thought: "half" }),
    message({ text: "more" }),
  ];
  const body = chatBody(messages, { ...DEFAULTS, system: "Be short.", temperature: 0, thinking: "low" });
  assert.deepEqual(body, {
    messages: [
      { role: "system", content: "Be short." },
      { role: "user", content: [{ type: "image_url", image_url: { url: "data:image/png;base64,AA" } }, { type: "text", text: "look" }] },
      { role: "assistant", content: "red", reasoning_content: "a circle" },
      { role: "user", content: "more" },
    ],
    stream: true,
    return_progress: true,
    temperature: 0,
    reasoning_effort: "low",
  });
  assert.equal(chatBody([], { ...DEFAULTS, thinking: "off" }).enable_thinking, false);
  assert.equal("enable_thinking" in chatBody([], DEFAULTS), false);
});

test("stored settings that are no settings are replaced", () => {
  for (const junk of [null, 3, "x", [], { temperature: "hot", topP: 7, maxTokens: 1.5, thinking: "hard", system: 4, theme: "pink" }]) {
    assert.deepEqual(checked(junk), DEFAULTS);
  }
  const good = { temperature: 0, topP: 1, maxTokens: 9, thinking: "max", system: "s", theme: "dark" };
  assert.deepEqual(checked(good), good);
});

test("metrics are read with labels and infinities, and what lacks is null", () => {
  const text = '# HELP x y\nllamacpp:requests_processing 2\na:b{c="d\\"e",f="g"} +Inf\nplain 1.5e3 1700\n\nbad line\n';
  assert.deepEqual(parseMetrics(text), [
    { name: "requests_processing", labels: {}, value: 2 },
    { name: "b", labels: { c: 'd"e', f: "g" }, value: Infinity },
    { name: "plain", labels: {}, value: 1500 },
    { name: "bad", labels: {}, value: NaN },
  ]);
  const now = snapshotOf(text, 5);
  assert.equal(now.running, 2);
  assert.equal(now.promptTokens, null);
});

test("rates come from two looks; a restart of the server begins anew", () => {
  const look = (atMs: number, tokens: number, seconds: number) =>
    snapshotOf(`x:tokens_predicted_total ${tokens}\nx:tokens_predicted_seconds_total ${seconds}`, atMs);
  const looks = [look(0, 100, 1), look(2000, 300, 2), look(3000, 300, 2)];
  assert.deepEqual(perSecond(looks, "replyTokens"), [100, 0]);
  assert.equal(ratio(looks, "replyTokens", "replySeconds"), 200);
  assert.equal(ratio(looks.slice(1), "replyTokens", "replySeconds"), null);
  assert.equal(ratio(looks, "promptTokens", "promptSeconds"), null);
  assert.equal(share(1, 4), 0.25);
  assert.equal(share(1, 0), null);
  assert.equal(withLook(looks, look(4000, 5, 0)).length, 1);
  let many: ReturnType<typeof withLook> = [];
  for (let at = 0; at < 500; at += 1) many = withLook(many, look(at, at, at));
  assert.equal(many.length, 120);
});

test("slots that are not as expected are left out", () => {
  assert.deepEqual(busySlots({ error: "no" }), []);
  const busy = { id: 0, is_processing: true, request_id: "r7", state: "decoding", n_prompt_tokens: 9, n_prompt_tokens_processed: 4, n_prompt_tokens_cache: 5, next_token: [{ n_decoded: 3 }] };
  assert.deepEqual(busySlots([null, 3, { id: 1, is_processing: false }, busy]), [
    { id: "r7", state: "decoding", promptTokens: 9, promptDone: 9, replyTokens: 3 },
  ]);
});
