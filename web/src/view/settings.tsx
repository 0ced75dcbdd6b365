/** Settings of requests and of the page; each change counts at once. */

import { useId } from "preact/hooks";
import { DEFAULTS, type Settings, THEMES, THINKING, type Theme, type Thinking } from "../state/types.ts";
import { Dialog } from "./dialog.tsx";

const THINKING_NAMES: Record<Thinking, string> = {
  default: "As the server is set",
  off: "Off",
  on: "On",
  minimal: "On, minimal effort",
  low: "On, low effort",
  medium: "On, medium effort",
  high: "On, high effort",
  xhigh: "On, very high effort",
  max: "On, greatest effort",
};
const THEME_NAMES: Record<Theme, string> = { auto: "As the device", light: "Light", dark: "Dark" };

interface Props {
  settings: Settings;
  hasKey: boolean;
  onChange: (settings: Settings) => void;
  onForgetKey: () => void;
  onClose: () => void;
}

export function SettingsDialog({ settings, hasKey, onChange, onForgetKey, onClose }: Props) {
  const set = (change: Partial<Settings>) => onChange({ ...settings, ...change });
  return (
    <Dialog title="Settings" onClose={onClose}>
      <label class="field">
        <span>System prompt</span>
        <textarea rows={4} value={settings.system} onInput={(event) => set({ system: event.currentTarget.value })} />
      </label>
      <Choice
        label="Thinking"
        value={settings.thinking}
        choices={THINKING}
        names={THINKING_NAMES}
        onChange={(thinking) => set({ thinking })}
      />
      <Numeric label="Temperature" low={0} high={2} step={0.05} value={settings.temperature} onChange={(temperature) => set({ temperature })} />
      <Numeric label="Top-p" low={0} high={1} step={0.01} value={settings.topP} onChange={(topP) => set({ topP })} />
      <Numeric label="Most tokens of a reply" low={1} step={1} value={settings.maxTokens} onChange={(maxTokens) => set({ maxTokens })} />
      <Choice label="Colours" value={settings.theme} choices={THEMES} names={THEME_NAMES} onChange={(theme) => set({ theme })} />
      <div class="row">
        {hasKey && (
          <button type="button" onClick={onForgetKey}>
            Forget the key
          </button>
        )}
        <button type="button" onClick={() => onChange(DEFAULTS)}>
          Restore defaults
        </button>
        <button type="button" class="primary" onClick={onClose}>
          Done
        </button>
      </div>
    </Dialog>
  );
}

interface NumericProps {
  label: string;
  low: number;
  high?: number;
  step: number;
  value: number | null;
  onChange: (value: number | null) => void;
}

/** Empty leaves the value to the server. What is out of range is marked, and not taken. */
function Numeric({ label, low, high, step, value, onChange }: NumericProps) {
  const hint = useId();
  const range = high === undefined ? `at least ${low}` : `${low} to ${high}`;
  return (
    <label class="field inline">
      <span>
        {label} <small id={hint}>{range}</small>
      </span>
      <input
        type="number"
        inputMode="decimal"
        min={low}
        {...(high === undefined ? {} : { max: high })}
        step={step === 1 ? 1 : "any"}
        placeholder="server's"
        aria-describedby={hint}
        value={value ?? ""}
        onChange={(event) => {
          const { value: text, validity, valueAsNumber } = event.currentTarget;
          if (validity.valid) onChange(text === "" ? null : valueAsNumber);
        }}
      />
    </label>
  );
}

interface ChoiceProps<T extends string> {
  label: string;
  value: T;
  choices: readonly T[];
  names: Record<T, string>;
  onChange: (value: T) => void;
}

function Choice<T extends string>({ label, value, choices, names, onChange }: ChoiceProps<T>) {
  return (
    <label class="field inline">
      <span>{label}</span>
      <select value={value} onChange={(event) => onChange(event.currentTarget.value as T)}>
        {choices.map((choice) => (
          <option key={choice} value={choice} selected={choice === value}>
            {names[choice]}
          </option>
        ))}
      </select>
    </label>
  );
}
