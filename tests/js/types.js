// Checks the types of each view's scripts together, as the page runs them.
import process from "node:process";
import { spawnSync } from "node:child_process";

const VIEWS = {
  race: "helpers player chart tree lanes bars pending_tokens slow_motion tiles ribbon panels inspector transport result_image run_history race",
  how: "helpers chart tree pending_tokens slow_motion maths how",
  setup: "helpers address setup",
  lab: "helpers chart lab",
  sweep: "helpers chart pays sweep",
  whatif: "helpers chart whatif",
  why: "helpers why",
};
const OPTIONS = "--allowJs --checkJs --noEmit --strict false --target es2023 --lib es2023,dom,dom.iterable --moduleDetection legacy";

for (const scripts of Object.values(VIEWS)) {
  const files = scripts.split(" ").map((name) => `../../specdemo/ui/${name}.js`);
  const { status } = spawnSync("tsc", [...OPTIONS.split(" "), "page.d.ts", ...files], { stdio: "inherit" });
  process.exitCode ||= status ?? 1; // null: tsc could not be started
}
