/** The live monitor: speed, queue, sessions, cache, drafts, memory. */

import type { ComponentChildren } from "preact";
import { KEPT, perSecond, ratio, share } from "../monitor/rates.ts";
import { useWatch } from "../monitor/poll.ts";
import type { Snapshot } from "../monitor/metrics.ts";
import type { Slot } from "../monitor/slots.ts";
import type { Client } from "../server/client.ts";
import { Icon } from "./icons.tsx";
import { bytes, percent, rate, whole } from "./numbers.ts";

export function Monitor({ client, onClose }: { client: Client; onClose: () => void }) {
  const { looks, slots, problem } = useWatch(client);
  const now = looks.at(-1);
  return (
    <aside class="monitor" id="monitor" aria-label="Monitor">
      <header>
        <h2>Monitor</h2>
        <button type="button" class="quiet" aria-label="Close the monitor" onClick={onClose}>
          <Icon name="close" />
        </button>
      </header>
      {problem && <p class="note error">{problem}</p>}
      {now ? <Figures looks={looks} now={now} slots={slots} /> : !problem && <p class="hint">Asking the server</p>}
    </aside>
  );
}

function Figures({ looks, now, slots }: { looks: Snapshot[]; now: Snapshot; slots: Slot[] | null }) {
  const firstToken = ratio(looks, "firstTokenSeconds", "firstTokenCount");
  const found = (now.hitsRam ?? 0) + (now.hitsDisk ?? 0);
  return (
    <>
      <Speed name="Prefill" looks={looks} tokens="promptTokens" seconds="promptSeconds" />
      <Speed name="Decode" looks={looks} tokens="replyTokens" seconds="replySeconds" />
      <Group name="Requests">
        <Row name="Running" value={now.running} show={whole} />
        <Row name="Waiting" value={now.waiting} show={whole} />
        <Row name="Time to first token" value={firstToken} show={(value) => `${value.toFixed(2)} s`} />
      </Group>
      {slots !== null && slots.length > 0 && <Sessions slots={slots} />}
      <Group name="Cache">
        <Row name="Prompts that hit" value={share(found, now.requests ?? found + (now.misses ?? 0))} show={percent} />
        <Row name="from RAM" value={now.hitsRam} show={whole} />
        <Row name="from disk" value={now.hitsDisk} show={whole} />
        <Row name="Tokens reused" value={now.cachedTokens} show={whole} />
        <Row name="States kept" value={now.cacheEntries} show={whole} />
        <Row name="RAM" value={now.cacheRamBytes} show={bytes} />
        <Row name="Disk" value={now.cacheDiskBytes} show={bytes} />
      </Group>
      <Group name="Drafts">
        <Row name="Accepted" value={share(now.draftAccepted, now.draftTokens)} show={percent} />
        <Row name="Accepted lately" value={ratio(looks, "draftAccepted", "draftTokens")} show={percent} />
        <Row name="Drafted" value={now.draftTokens} show={whole} />
      </Group>
      <Group name="Memory">
        <Row name="Key/value pages in use" value={now.kvShare} show={percent} bar />
        <Row name="Tokens in sessions" value={now.sessionTokens} show={whole} />
        <Row name="Process" value={now.residentBytes} show={bytes} />
        <Row name="GPU" value={now.gpuBytes || null} show={bytes} />
      </Group>
    </>
  );
}

interface SpeedProps {
  name: string;
  looks: Snapshot[];
  tokens: "promptTokens" | "replyTokens";
  seconds: "promptSeconds" | "replySeconds";
}

/** Tokens a second of the clock, and below it of the time spent on that work. */
function Speed({ name, looks, tokens, seconds }: SpeedProps) {
  const series = perSecond(looks, tokens);
  const working = ratio(looks, tokens, seconds);
  return (
    <section class="speed" aria-label={name}>
      <h3>{name}</h3>
      <p class="now">{rate(series.at(-1) ?? 0)}</p>
      <Sparkline series={series} name={name} />
      <p class="hint">{working === null ? "idle" : `while working: ${rate(working)}`}</p>
    </section>
  );
}

const WIDTH = 240;
const HEIGHT = 40;

function Sparkline({ series, name }: { series: number[]; name: string }) {
  const peak = Math.max(1, ...series);
  const step = WIDTH / (KEPT - 2);
  const points = series.map((value, index) => {
    const x = WIDTH - (series.length - 1 - index) * step;
    return `${x.toFixed(1)},${(HEIGHT - 1 - (value / peak) * (HEIGHT - 2)).toFixed(1)}`;
  });
  const label = `${name}, last two minutes: at most ${rate(Math.max(0, ...series))}`;
  return (
    <svg class="spark" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={label}>
      {points.length > 1 && <polyline points={points.join(" ")} />}
    </svg>
  );
}

function Group({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <section aria-label={name}>
      <h3>{name}</h3>
      <dl>{children}</dl>
    </section>
  );
}

interface RowProps {
  name: string;
  value: number | null;
  show: (value: number) => string;
  bar?: boolean;
}

/** A figure that the server does not report, or that nothing was counted for, is a dash. */
function Row({ name, value, show, bar = false }: RowProps) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>
        {bar && value !== null && <meter min={0} max={1} value={value} aria-label={name} />}
        {value === null ? "–" : show(value)}
      </dd>
    </div>
  );
}

function Sessions({ slots }: { slots: Slot[] }) {
  return (
    <section aria-label="Sessions">
      <h3>Sessions</h3>
      <ul class="sessions">
        {slots.map((slot) => (
          <li key={slot.id}>
            <span>
              {slot.id} {slot.state}
            </span>
            <span>
              prompt {whole(Math.min(slot.promptDone, slot.promptTokens))}/{whole(slot.promptTokens)}, reply {whole(slot.replyTokens)}
            </span>
          </li>
        ))}
      </ul>
    </section>
  );
}
