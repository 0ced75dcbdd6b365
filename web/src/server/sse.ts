/** Server-sent events as the data of each event; comments (keep-alive) and other fields are skipped. */
export async function* eventData(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const parser = new EventParser();
  const reader = body.pipeThrough(new TextDecoderStream() as unknown as ReadableWritablePair<string, Uint8Array>).getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield* parser.feed(part.value);
  } finally {
    await reader.cancel().catch(() => undefined); // leaving the loop early ends the request
  }
}

/** The parser alone; `feed` takes text cut anywhere and returns the events completed by it. */
export class EventParser {
  private rest = "";
  private data: string[] = [];

  feed(text: string): string[] {
    const events: string[] = [];
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop() ?? "";
    for (const line of lines) this.line(line.endsWith("\r") ? line.slice(0, -1) : line, events);
    return events;
  }

  private line(line: string, events: string[]): void {
    if (line.startsWith("data:")) {
      this.data.push(line.slice(line[5] === " " ? 6 : 5));
    } else if (line === "" && this.data.length) {
      events.push(this.data.join("\n"));
      this.data = [];
    }
  }
}
