// What Gradio gives the script of an HTML component, and what the lines of a race's log hold (specdemo/ui/views.py).

declare const element: HTMLElement;
declare const props: { value: string; [name: string]: any };
declare function trigger(event: string, data?: object): void;
declare function watch(name: string, changed: () => void): void;

interface Window {
  specdemoLinked?: boolean; // false while settings of an address are read
}

interface Numbers {
  clock_ms?: number;
  recent?: number;
  tokens?: number;
  [name: string]: any;
}

interface Line {
  type: "step" | "done";
  lane: number;
  at?: number; // ms of device time at which it is shown
  so_far?: Numbers;
  [name: string]: any;
}

interface Lane {
  index: number;
  name: string;
  lines: Line[];
  next?: number; // the first line that is not on show
  received: number; // ms of device time the lines reach to
  offset: number | null; // ms other lanes took before
  over?: boolean;
  [name: string]: any;
}

interface Run {
  recorded: boolean;
  still?: boolean;
  start: { schedule?: "race" | "sequential"; [name: string]: any };
  end: any;
  lanes?: Lane[];
  [name: string]: any;
}
