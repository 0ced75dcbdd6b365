/** Numbers as a person reads them. */

export function rate(perSecond: number): string {
  return `${perSecond >= 100 ? Math.round(perSecond).toLocaleString("en") : perSecond.toFixed(1)} tok/s`;
}

export function percent(share: number): string {
  return `${Math.round(share * 100)} %`;
}

export function whole(count: number): string {
  return Math.round(count).toLocaleString("en");
}

/** Decimal units: 1 kB is 1000 bytes, as in civetta's log. */
export function bytes(count: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}
