import js from "@eslint/js";
import globals from "globals";

const gradio = { element: "readonly", props: "readonly", watch: "readonly" };

export default [
  js.configs.recommended,
  {
    // one program over several files, so only tsc can tell what is defined and what is used
    files: ["**/specdemo/ui/*.js"],
    languageOptions: { sourceType: "script", globals: { ...globals.browser, ...gradio } },
    rules: { "no-undef": "off", "no-unused-vars": ["error", { vars: "local", ignoreRestSiblings: true }], eqeqeq: ["error", "always", { null: "ignore" }], "no-var": "error", "prefer-const": "error" },
  },
  { files: ["*.js"], languageOptions: { globals: globals.node } },
];
