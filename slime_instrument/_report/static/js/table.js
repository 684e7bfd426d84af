// The sample table, by Tabulator.
let table = null;

const REASONS = {
  "no-response": "its response is empty", masked: "all its tokens are masked", "no-log-probs": "no token has both log-probs",
  removed: "the rollout marked it as removed", "not-scheduled": "training never scheduled it", "missing-shard": "its part of the train dump is missing",
  ambiguous: "several samples fit", duplicate: "two train samples claim this place", "tokens-differ": "the tokens of the two sides differ",
};

function reason(code) {
  if (!code) return "";
  return REASONS[code] || code.replace(/-/g, " ");
}

function cellNumber(cell) {
  const value = cell.getValue();
  return element("span", value === null ? { title: "not known" } : {}, number(value));
}

function cellText(cell) {
  const value = cell.getValue();
  return element("span", value === null || value === "" ? { title: "not known" } : { title: String(value) }, value === null || value === "" ? "–" : value);
}

function numeric(title, field, tooltip, minWidth = 84) {
  return {
    title, field, headerTooltip: tooltip, hozAlign: "right", headerHozAlign: "right", formatter: cellNumber, sorter: "number",
    sorterParams: { alignEmptyValues: "bottom" }, headerFilter: "input", headerFilterPlaceholder: "≥", headerFilterFunc: atLeast, minWidth,
  };
}

// "0.1" and ">=0.1" mean at least, "<0.1" below, "=3" exactly; a value that is not known fits nothing.
function atLeast(wanted, value) {
  const parts = /^\s*(<=|>=|<|>|=)?\s*(-?[\d.]+(?:e-?\d+)?)\s*$/i.exec(wanted.replace("−", "-"));
  if (!parts || value === null) return !parts;
  const limit = Number(parts[2]);
  return { "<": value < limit, "<=": value <= limit, ">": value > limit, "=": value === limit }[parts[1]] ?? value >= limit;
}

function textual(title, field, more) {
  return { title, field, formatter: cellText, headerFilter: "input", headerFilterPlaceholder: "contains", sorter: "string",
    sorterParams: { alignEmptyValues: "bottom" }, minWidth: 84, ...more };
}

function drawTable(rows, onOpen, chosen) {
  if (table) table.destroy();
  const some = (field) => rows.some((row) => row[field] !== null && row[field] !== "");
  const columns = [
    numeric("sample", "position", "Position in the rollout dump", 68),
    numeric("mean |δ|", "mean_abs", "Mean difference of the two log-probs, without sign"),
    numeric("max |δ|", "max_abs", "Largest difference of one token"),
    numeric("mean δ", "mean", "With sign: above 0, training finds the tokens more probable"),
    { ...textual("findings", "findings", { minWidth: 120 }), visible: some("findings") },
    { ...textual("not compared because", "left_out", { minWidth: 124 }), visible: some("left_out") },
    numeric("reward", "reward", "Reward at rollout, before normalisation", 74),
    { ...textual("reward", "reward_text"), visible: some("reward_text") },
    numeric("advantage", "advantage", "Mean over the trained tokens", 94),
    numeric("length", "response_length", "Response tokens", 72),
    numeric("compared", "n_tokens", "Tokens that are trained and have both log-probs", 92),
    textual("status", "status"),
    { ...numeric("staleness", "staleness", "How many weight updates older than the newest the weights are that sampled it", 92), visible: some("staleness") },
    numeric("index", "index", "slime's own number of the sample", 72),
  ];
  table = new Tabulator("#table", {
    data: rows, columns, height: rows.length > 12 ? 430 : undefined, layout: "fitColumns", index: "key", placeholder: "No sample fits.",
    initialSort: [{ column: "max_abs", dir: "desc" }], headerSortClickElement: "header", selectableRows: false, printAsHtml: true, columnDefaults: { headerWordWrap: true },
    rowFormatter: (row) => row.getElement().classList.toggle("chosen", row.getData().key === chosen()),
  });
  table.on("rowClick", (_event, row) => onOpen(row.getData()));
  table.on("dataFiltered", (_filters, left) => {
    document.getElementById("sample-count").textContent = left.length === rows.length ? `${number(rows.length)}` : `${number(left.length)} of ${number(rows.length)}`;
  });
  return new Promise((done) => table.on("tableBuilt", done));
}

function markChosen() {
  if (table) table.getRows("visible").forEach((row) => row.reformat());
}
