// What Gradio gives the script of an HTML component, what the lines of a race's log hold (specdemo/ui/views.py), and options of shared code.

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

interface Display {
  pace: () => number | "auto"; // playback speed: 1 is real time, 0.5 is half speed
  show: (lane: Lane, lines: Line[]) => void; // draws lines of a lane
  after: (shown: number) => void; // called after every update of the clock, with the number of lines shown
  reset?: (lane: Lane) => void; // clears a lane
  begin?: (lane: Lane, line: Line, ms: number) => void; // called when a step begins that takes `ms` milliseconds
  scene?: () => { at: number; show: () => number } | null; // a scene that stops the clock at a device time; show returns its duration, ms
  sceneOver?: () => void;
  request?: (draw: FrameRequestCallback) => number;
  cancel?: (frame: number) => void;
  now?: () => number; // ms
}

interface Curve {
  name?: string;
  points: number[][];
  series: number; // selects colour and dash
  faint?: boolean;
  dashed?: boolean;
  marks?: boolean; // draw points and whiskers instead of a band
  band?: number[][]; // interval as x, low, high
  texts?: string[]; // labels of the points
  notes?: string[]; // more about each point, for the pointer
}

interface Bar {
  value: number;
  low?: number | null;
  high?: number | null;
  series: number;
  predicted?: number | null;
  name?: string;
}

interface Chart {
  label: string; // description for screen readers
  lines?: Curve[];
  bars?: (number | null)[]; // heights of vertical bars at `first`, `first` + 1, ...
  first?: number; // default: 0
  groups?: { name: string; bars: Bar[] }[]; // horizontal bars
  stacked?: boolean; // the bars of a group follow one another
  dots?: { x: number; y: number; name: string }[];
  unit?: string; // of x
  suffix?: string; // unit of the values
  digits?: number; // decimals of the values
  high?: number; // top of the y axis; default: the largest value
  zoom?: boolean; // begin the y axis near the smallest value instead of at 0
  from?: number; // start of the x axis; default: 0
  wide?: number; // end of the x axis
  direct?: boolean; // names at the ends of the lines at any width
  places?: number[]; // ticks of the x axis, which begins at the first
  doubling?: boolean; // logarithmic x axis
  whole?: boolean; // draw steps instead of slopes
  percentage?: boolean;
  level?: number; // value of a reference line, such as "no gain"
  baseline?: string; // name of the reference line
  series?: number; // colour of the bars
}
