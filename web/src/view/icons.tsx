/** Icons, drawn on a 24 x 24 grid. They are never the only name of a button. */

const PATHS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V6M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  picture: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9.5h.01",
  settings:
    "M4 7h9M17 7h3M4 17h3M11 17h9M15 7m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0M9 17m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
  monitor: "M4 18V6M4 18h16M8 15l3-5 3 3 5-7",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 13l4 4L19 7",
  again: "M19 12a7 7 0 1 1-2.2-5M19 4v4h-4",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  remove: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13",
  down: "M12 5v14M6 13l6 6 6-6",
} as const;

export function Icon({ name }: { name: keyof typeof PATHS }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
