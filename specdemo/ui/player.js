// The clock of the display. A line is shown when the clock reaches its device time, so playback speed and replay do not affect
// the engine. Independent of the DOM: callbacks draw the lines.

const AUTO_MS = 4000; // duration of the fastest lane at speed "auto"; the slowest takes at most three times as long
const TOKEN_MS = 60; // longest time per token at speed "auto"
const AUTO_START = 1 / 8; // speed "auto" before the speed of any lane is known
const MIN_SPEED = 1 / 1000;
const AWAITED = -1; // in place of a frame: the next line draws, because all others are on show
/** @type {Partial<Display>} */
const ON_SCREEN = {
  reset() {}, begin() {}, scene: () => null, sceneOver() {}, // draw nothing
  request: (draw) => requestAnimationFrame(draw), cancel: (frame) => cancelAnimationFrame(frame), now: () => performance.now(),
};

class Player {
  /** @type {Run} */
  run = null;
  replay = false;
  paused = false;
  skipped = false;
  clock = 0;
  last = 0;
  frame = 0;
  held = 0; // ms for which a scene still stops the clock

  /** @param {Display} does */
  constructor(does) {
    this.does = /** @type {Required<Display>} */ ({ ...ON_SCREEN, ...does });
  }

  /** Loads a run at its start. Replayed lanes start together, even if they ran sequentially.
   * @param {Run} run @param {boolean} replay */
  load(run, replay) {
    this.stop();
    Object.assign(this, { run, replay, paused: false, skipped: false, clock: 0, last: 0, held: 0 });
  }

  stop() {
    if (this.frame > 0) this.does.cancel(this.frame);
    this.frame = 0;
  }

  /** @param {Lane} lane @param {Line} line */
  receive(lane, line) {
    const sequential = this.run.start.schedule === "sequential";
    lane.offset ??= sequential ? sum(this.run.lanes.map((other) => other.received)) : 0;
    if (line.type === "step") lane.received = line.so_far.clock_ms;
    else lane.over = true;
    line.at = lane.received;
    lane.lines.push(line);
  }

  /** Forgets the lines of a lane. @param {Lane} lane */
  restart(lane) {
    Object.assign(lane, { lines: [], received: 0, over: false, next: 0, announced: null });
  }

  get playing() {
    return this.frame !== 0;
  }

  /** Playback speed: device time per display time. */
  get speed() {
    const pace = this.does.pace();
    if (pace !== "auto") return pace;
    const durations = this.run.lanes.map((lane) => this.length(lane)).filter(isNumber);
    if (!durations.length) return AUTO_START;
    const targetMs = Math.min(AUTO_MS, TOKEN_MS * (this.run.end ? this.tokens : this.run.start.limit || Infinity));
    return Math.max(MIN_SPEED, Math.min(1, Math.max(Math.min(...durations) / targetMs, Math.max(...durations) / (3 * targetMs))));
  }

  /** Number of tokens of the longest text, at least 2. */
  get tokens() {
    return Math.max(2, ...this.run.lanes.map((lane) => lane.lines.findLast((line) => line.so_far)?.so_far.tokens || 0));
  }

  /** Returns the device time (ms) from a lane's first token to its last one, extrapolated while it runs; null if unknown.
   * @param {Lane} lane */
  length(lane) {
    const steps = lane.over ? lane.lines.slice(0, -1) : lane.lines;
    if (steps.length < 2) return null;
    const passed = lane.received - steps[0].at;
    const { tokens } = steps.at(-1).so_far;
    const limit = this.run.start.limit;
    return lane.over || !limit || !(tokens > 1) ? passed : (passed * (limit - 1)) / (tokens - 1);
  }

  /** Device time (ms) at which the slowest lane ends or is expected to end. */
  get span() {
    return Math.max(0, ...this.run.lanes.map((lane) => (lane.lines[0]?.at ?? 0) + (this.length(lane) ?? 0)));
  }

  /** Returns the device time of a lane at the current clock, ms.
   * @param {Lane} lane */
  timeOf(lane) {
    const shown = lane.next ? lane.lines[lane.next - 1].at : 0;
    if (!this.frame && !this.paused) return shown;
    return Math.max(shown, Math.min(this.clock - (this.replay ? 0 : lane.offset || 0), lane.received));
  }

  get immediate() {
    return !this.replay && (this.skipped || this.speed === 1);
  }

  get over() {
    return Boolean(this.run.end) && this.run.lanes.every((lane) => lane.next >= lane.lines.length);
  }

  play() {
    if (this.paused) return;
    if (this.immediate || (this.run.recorded && !this.replay)) return this.advance(Infinity);
    if (this.frame <= 0) this.start();
  }

  start() {
    this.paused = false;
    this.last = this.does.now();
    if (!this.clock && this.does.pace() === "auto") this.clock = this.firstToken();
    this.frame = this.does.request((now) => this.tick(now));
  }

  /** Returns the time of the first token. Playback starts there, because a slowed prefill would be a long wait. */
  firstToken() {
    const started = this.run.lanes.filter((lane) => lane.lines.length);
    return started.length ? Math.min(...started.map((lane) => this.due(lane, lane.lines[0]))) : 0;
  }

  pause() {
    this.stop();
    this.paused = true;
  }

  /** @param {number} now */
  tick(now) {
    const passed = Math.max(0, now - this.last);
    const held = Math.min(passed, this.held);
    this.last = now;
    this.held -= held;
    if (held && !this.held) this.does.sceneOver();
    const scene = this.immediate || this.held ? null : this.does.scene();
    const later = this.held ? this.clock : this.clock + (passed - held) * this.speed;
    this.clock = Math.max(this.clock, Math.min(later, this.horizon(), this.nextStep(), scene?.at ?? Infinity));
    this.advance(this.immediate ? Infinity : this.clock);
    if (scene && this.clock >= scene.at) this.held = scene.show();
    if (this.over || this.paused) this.frame = 0;
    else this.frame = this.immediate ? AWAITED : this.does.request((next) => this.tick(next));
  }

  /** @param {Lane} lane @param {Line} line */
  due(lane, line) {
    return line.at + (this.replay ? 0 : lane.offset);
  }

  /** Returns the time up to which all open lanes have reported. The display waits there and does not jump afterwards. */
  horizon() {
    const open = this.run.lanes.filter((lane) => !lane.over);
    const reached = open.map((lane) => lane.received + (this.replay ? 0 : lane.offset || 0));
    if (this.run.end || !open.length) return Infinity;
    return this.run.start.schedule === "sequential" ? Math.max(...reached) : Math.min(...reached);
  }

  /** Returns the latest clock of the next frame. A slow speed shows every draft in at least one frame, however long a frame takes. */
  nextStep() {
    const pace = this.does.pace();
    if (pace === "auto" || pace >= 1) return Infinity;
    const open = this.run.lanes.filter(({ next, lines }) => lines[next + 1]?.draft_outcomes?.some(Boolean));
    const limits = open.map((lane) => [lane.next, lane.next + 1].map((i) => this.due(lane, lane.lines[i])));
    return Math.min(Infinity, ...limits.map(([due, following]) => Math.max(due, following - 0.001)));
  }

  /** @param {number} clock */
  advance(clock) {
    let shown = 0;
    for (const lane of this.run.lanes) {
      const first = lane.next;
      while (lane.next < lane.lines.length && this.due(lane, lane.lines[lane.next]) <= clock) {
        this.clock = Math.max(this.clock, this.due(lane, lane.lines[lane.next])); // lines shown immediately also move the clock
        lane.next += 1;
      }
      if (lane.next > first) this.does.show(lane, lane.lines.slice(first, lane.next));
      if (this.frame || clock !== Infinity) this.announce(lane);
      shown += lane.next - first;
    }
    this.does.after(shown);
  }

  /** Reports the step that a lane is in, once.
   * @param {Lane} lane */
  announce(lane) {
    const line = lane.lines[lane.next];
    if (this.paused || !lane.next || line?.type !== "step" || lane.announced === line) return;
    lane.announced = line;
    this.does.begin(lane, line, (this.due(lane, line) - this.due(lane, lane.lines[lane.next - 1])) / this.speed);
  }

  /** Shows the run at a time and pauses.
   * @param {number} clock */
  seek(clock) {
    this.pause();
    if (this.run.end) this.replay = true;
    if (clock < this.clock || this.run.lanes.some((lane) => lane.next && this.due(lane, lane.lines[lane.next - 1]) > clock)) {
      for (const lane of this.run.lanes) {
        Object.assign(lane, { next: 0, announced: null });
        this.does.reset(lane);
      }
    }
    this.clock = clock;
    this.advance(clock);
  }

  /** Returns the time at which a lane has shown `by` more steps; null if there is no such step.
   * @param {Lane} lane @param {number} by */
  stepTime(lane, by) {
    const steps = lane.lines.filter((line) => line.type === "step");
    const shown = Math.min(lane.next, steps.length) + by;
    return shown < 1 || shown > steps.length ? null : this.due(lane, steps[shown - 1]);
  }

  /** Shows all remaining lines immediately, and further lines of a live run as they arrive. */
  skip() {
    this.stop();
    this.paused = false;
    this.skipped = true;
    this.advance(Infinity);
  }
}
