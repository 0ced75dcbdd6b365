/** Whether a finger is what points: then Enter ends a line, and a focus would open the keyboard. */
export function isTouch(): boolean {
  return matchMedia("(pointer: coarse)").matches;
}
