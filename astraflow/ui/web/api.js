// Where answers come from: the server, or the files of an export.

let isExport = false;
const answers = new Map();
const waiting = new Map();

export function configure(settings) {
  isExport = settings.isExport;
  if (isExport) {
    window.astraflowAnswer = (path, content) => answers.set(path, content);
  }
}

export function exported() {
  return isExport;
}

/** Returns an answer as JSON; throws an Error that says what is wrong. */
export async function get(path, query = {}) {
  if (isExport) return fromFile(path);
  const text = new URLSearchParams(query).toString();
  const url = `/api/${path.split("/").map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
  let answer;
  try {
    answer = await fetch(url, { credentials: "same-origin" });
  } catch {
    throw new Error("astraflow ui does not answer; start it again");
  }
  if (!answer.headers.get("content-type")?.includes("json")) throw new Error(await answer.text());
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

function fromFile(path) {
  if (answers.has(path)) return answers.get(path);
  if (!waiting.has(path)) {
    waiting.set(path, new Promise((done, fail) => {
      const script = document.createElement("script");
      script.src = `data/${fileOf(path)}`;
      script.onload = () => done(answers.get(path));
      script.onerror = () => fail(new Error("this is not part of the exported page"));
      document.head.append(script);
    }));
  }
  return waiting.get(path);
}

function fileOf(path) {
  const quoted = encodeURIComponent(path).replace(/[!'()*]/g, (c) => `%${c.charCodeAt(0).toString(16).toUpperCase()}`);
  return `${quoted.replaceAll("%", "=")}.js`;
}

/** Returns a page of rollouts; the files of an export are searched here. */
export async function rollouts(run, query) {
  const path = `runs/${run}/rollouts`;
  if (!isExport) return get(path, query);
  const all = await get(path);
  const name = (query.sort ?? "-time").replace("-", "");
  const sign = (query.sort ?? "-time").startsWith("-") ? -1 : 1;
  const rows = all.rows.filter((row) => keeps(row, query)).sort((a, b) => {
    if (a[name] === null || b[name] === null) return (a[name] === null) - (b[name] === null);
    return sign * (a[name] < b[name] ? -1 : Number(a[name] > b[name]));
  });
  const offset = Number(query.offset ?? 0);
  return { ...all, found: rows.length, offset, rows: rows.slice(offset, offset + Number(query.limit ?? 200)) };
}

function keeps(row, query) {
  return Object.entries(query).every(([key, value]) => {
    if (value === "" || ["sort", "offset", "limit"].includes(key)) return true;
    if (key === "text") return [row.id, row.group, row.prompt].some((each) => each.includes(value));
    const [name, bound] = key.split(".");
    if (!bound) return row[name] === value;
    if (row[name] === null) return false;
    return bound === "min" ? row[name] >= Number(value) : row[name] <= Number(value);
  });
}
