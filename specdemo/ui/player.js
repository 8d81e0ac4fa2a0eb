// The display's clock. Lines are shown when it reaches their device time, so the pace of the display, and a replay, never
// touch the engine. Knows no DOM: whoever makes a player says how lines are shown.

class Player {
  /**
   * @param {object} does
   * @param {() => number} does.pace 1: as it comes; a half: at half speed
   * @param {(lane: Lane, lines: Line[]) => void} does.show the lines of a lane whose time has come
   * @param {(shown: number) => void} does.after after every look at the clock
   * @param {(draw: FrameRequestCallback) => number} [does.request]
   * @param {(frame: number) => void} [does.cancel]
   * @param {() => number} [does.now] milliseconds
   */
  constructor({ pace, show, after, request = (draw) => requestAnimationFrame(draw), cancel = (frame) => cancelAnimationFrame(frame), now = () => performance.now() }) {
    this.pace = pace;
    this.show = show;
    this.after = after;
    this.request = request;
    this.cancel = cancel;
    this.now = now;
    /** @type {Run} */
    this.run = null;
    this.replay = false;
    this.clock = this.last = this.frame = 0;
  }

  /** Another run, from its start. Replayed lanes start together; sequential ones follow each other only the first time.
   * @param {Run} run @param {boolean} replay */
  load(run, replay) {
    this.stop();
    this.run = run;
    this.replay = replay;
    this.clock = this.last = 0;
  }

  stop() {
    if (this.frame) this.cancel(this.frame);
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

  get playing() {
    return this.frame !== 0;
  }

  get atOnce() {
    return !this.replay && this.pace() === 1;
  }

  get over() {
    return Boolean(this.run.end) && this.run.lanes.every((lane) => lane.next >= lane.lines.length);
  }

  play() {
    if (this.atOnce || (this.run.recorded && !this.replay)) return this.advance(Infinity);
    if (!this.frame) this.start();
  }

  start() {
    this.last = this.now();
    this.frame = this.request((now) => this.tick(now));
  }

  /** @param {number} now */
  tick(now) {
    this.frame = 0;
    const passed = Math.max(0, now - this.last);
    this.last = now;
    this.clock = Math.min(this.clock + passed * this.pace(), this.horizon());
    this.advance(this.atOnce ? Infinity : this.clock);
    if (!this.over) this.frame = this.request((next) => this.tick(next));
  }

  /** @param {Lane} lane @param {Line} line */
  due(lane, line) {
    return line.at + (this.replay ? 0 : lane.offset);
  }

  /** How far the engine is known to have come: the display waits there and does not jump ahead afterwards. */
  horizon() {
    const open = this.run.lanes.filter((lane) => !lane.over);
    const reached = open.map((lane) => lane.received + (this.replay ? 0 : lane.offset || 0));
    if (this.run.end || !open.length) return Infinity;
    return this.run.start.schedule === "sequential" ? Math.max(...reached) : Math.min(...reached);
  }

  /** @param {number} clock */
  advance(clock) {
    let shown = 0;
    for (const lane of this.run.lanes) {
      const first = lane.next;
      while (lane.next < lane.lines.length && this.due(lane, lane.lines[lane.next]) <= clock) {
        this.clock = Math.max(this.clock, this.due(lane, lane.lines[lane.next])); // shown at once is behind the clock too
        lane.next += 1;
      }
      if (lane.next > first) this.show(lane, lane.lines.slice(first, lane.next));
      shown += lane.next - first;
    }
    this.after(shown);
  }

  /** Everything that is left, now. */
  skip() {
    this.stop();
    this.advance(Infinity);
  }
}
