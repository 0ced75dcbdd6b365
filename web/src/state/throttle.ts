/** Does something soon after it was asked for, once however often it was asked for until then. */
export class Throttle {
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly delayMs: number,
    private readonly act: () => void,
  ) {}

  ask(): void {
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      this.act();
    }, this.delayMs);
  }

  cancel(): void {
    clearTimeout(this.timer);
    this.timer = undefined;
  }
}
