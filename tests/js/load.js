import { URL } from "node:url";
import { readFileSync } from "node:fs";
import { createContext, runInContext } from "node:vm";

const ui = new URL("../../specdemo/ui/", import.meta.url);

/** The named definitions of some of the page's scripts, run one behind the other as the page does. */
export function load(scripts, names, globals = {}) {
  const source = scripts.map((name) => readFileSync(new URL(`${name}.js`, ui), "utf8")).join("\n");
  return runInContext(`(() => {${source}\nreturn { ${names} };})()`, createContext({ ...globals }));
}

/** What another realm made, as plain data of this one. */
export const plain = (value) => JSON.parse(JSON.stringify(value));
