"use strict";
// One page over /api/pool/members, /api/pool/swaps, /api/events and /metrics. Everything shown is text that
// was measured or said by the pool; it is put into the page as text, never as markup.

const WINDOW_S = 600;
const MAX_LOG = 200;
const REFRESH_MS = 2000;
const PHASES = ["drain", "sleep", "start", "wake", "verify"];
const BUSY = ["starting", "verifying", "draining", "suspending", "waking"];
const BAD = ["failed", "quarantined", "unknown"];
const byId = (id) => document.getElementById(id);

let members = [];
let key = sessionStorage.getItem("key") || "";
const turns = new Map(); // model -> [{from, to}] in seconds of the page's clock

const now = () => performance.now() / 1000;
const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "not measured";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024 || unit === "GiB") return `${bytes.toFixed(bytes < 10 && unit !== "B" ? 1 : 0)} ${unit}`;
    bytes /= 1024;
  }
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}

const kind = (state) => (BUSY.includes(state) ? "moving" : BAD.includes(state) ? "bad" : state);

function say(text) {
  if (byId("status").textContent !== text) byId("status").textContent = text;
}

async function ask(path, options = {}) {
  const reply = await fetch(path, { ...options, headers: headers() });
  if (reply.status === 401 || reply.status === 403) {
    byId("login").hidden = false;
    throw new Error(reply.status === 401 ? "a key is needed" : "this key may not operate the pool");
  }
  if (!reply.ok) {
    const body = await reply.json().catch(() => ({}));
    throw new Error((body.error && body.error.message) || `${path}: status ${reply.status}`);
  }
  return reply;
}

async function act(button, path, name) {
  button.disabled = true;
  try {
    await ask(`${path}?model=${encodeURIComponent(name)}`, { method: "POST" });
  } catch (error) {
    note(`${name}: ${error.message}`, true);
  }
  await refresh();
}

function showMembers() {
  const focused = document.activeElement && document.activeElement.dataset.model;
  const rows = [];
  for (const member of members) {
    const row = element("tr");
    const head = element("th", member.name);
    head.scope = "row";
    const state = element("td");
    state.append(element("span", member.state, `state ${kind(member.state)}`));
    row.append(head, state);
    const wake = member.wake_s === null ? member.start_s : member.wake_s;
    const cells = [size(member.memory_bytes), member.num_waiting, member.num_in_flight, seconds(wake), member.num_cycles];
    for (const text of cells) row.append(element("td", text));
    const asleep = member.state !== "ready";
    const button = element("button", asleep ? "Wake" : "Put to sleep");
    button.setAttribute("aria-label", `${button.textContent}: ${member.name}`);
    button.dataset.model = member.name;
    button.disabled = BUSY.includes(member.state);
    button.addEventListener("click", () => act(button, asleep ? "/wake_up" : "/sleep", member.name));
    row.append(element("td"));
    row.lastChild.append(button);
    rows.push(row);
    if (member.last_error) {
      const more = element("tr");
      const retry = member.retry_in_s ? ` Next attempt in ${seconds(member.retry_in_s)}.` : "";
      const cell = element("td", member.last_error + retry, "error");
      cell.colSpan = 8;
      more.append(cell);
      rows.push(more);
    }
  }
  byId("members").replaceChildren(...rows);
  if (focused) for (const b of document.querySelectorAll("button[data-model]")) if (b.dataset.model === focused) b.focus();
}

function shares(metrics) {
  const found = {};
  for (const line of metrics.split("\n")) {
    const match = /^pool_device_bytes\{group="([^"]*)",kind="([^"]*)"\} (\S+)$/.exec(line);
    if (match) (found[match[1]] = found[match[1]] || {})[match[2]] = Number(match[3]);
  }
  return found;
}

function showMemory(metrics) {
  const budgets = shares(metrics);
  const groups = new Map();
  for (const member of members) {
    if (!groups.has(member.device_group)) groups.set(member.device_group, []);
    groups.get(member.device_group).push(member);
  }
  const shown = [];
  for (const [group, held] of groups) {
    const budget = budgets[group] || {};
    const used = held.reduce((sum, member) => sum + (member.memory_bytes || 0), 0);
    const total = budget.total || Math.max(used, 1);
    const bar = element("div", undefined, "bar");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${group}: ${size(used)} of ${budget.total ? size(total) : "an unstated budget"}`);
    const terms = element("dl");
    const add = (name, bytes, className) => {
      const part = element("span", undefined, className);
      part.style.width = `${Math.min(100, (100 * bytes) / total)}%`;
      bar.append(part);
      terms.append(element("dt", name), element("dd", size(bytes)));
    };
    for (const member of held) if (member.memory_bytes) add(member.name, member.memory_bytes, kind(member.state));
    for (const other of ["foreign", "margin"]) if (budget[other]) add(other, budget[other], "other");
    if (budget.total) terms.append(element("dt", "budget"), element("dd", size(budget.total)));
    shown.push(element("h3", `${group} (${held[0].device})`), bar, terms);
  }
  byId("memory").replaceChildren(...shown);
}

function track() {
  for (const member of members) {
    if (!turns.has(member.name)) turns.set(member.name, []);
    const list = turns.get(member.name);
    const last = list[list.length - 1];
    const has = member.state === "ready" || member.state === "draining";
    if (has && (!last || last.to !== null)) list.push({ from: now(), to: null });
    if (!has && last && last.to === null) last.to = now();
    while (list.length && list[0].to !== null && list[0].to < now() - WINDOW_S) list.shift();
  }
}

function recall(swaps) {
  // The pool's clock is not ours: the latest swap's end and the time of its target as READY tie them.
  const target = members.find((member) => member.state === "ready");
  const latest = swaps[swaps.length - 1];
  if (!latest || !target || latest.to !== target.name) return;
  const end = (swap) => swap.time + swap.total_ms / 1000;
  const age = Math.max(0, target.idle_s || 0);
  const offset = now() - age - end(latest);
  for (let i = 0; i < swaps.length; i += 1) {
    const swap = swaps[i];
    if (!swap.to || swap.result !== "ok" || !turns.has(swap.to) || i === swaps.length - 1) continue;
    turns.get(swap.to).unshift({ from: end(swap) + offset, to: swaps[i + 1].time + offset });
  }
}

function showTimeline() {
  const start = now() - WINDOW_S;
  const lanes = [];
  for (const [name, list] of turns) {
    const lane = element("div", undefined, "lane");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", `0 0 ${WINDOW_S} 10`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    let total = 0;
    for (const turn of list) {
      const from = Math.max(turn.from - start, 0);
      const to = Math.min((turn.to === null ? now() : turn.to) - start, WINDOW_S);
      if (to <= from) continue;
      total += to - from;
      const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      for (const [attribute, value] of [["x", from], ["y", 0], ["width", Math.max(to - from, 1)], ["height", 10]]) {
        rect.setAttribute(attribute, value);
      }
      svg.append(rect);
    }
    svg.setAttribute("aria-label", `${name} was ready for ${Math.round(total)} of the last ${WINDOW_S} seconds`);
    lane.append(element("b", name), svg);
    lanes.push(lane);
  }
  byId("timeline").replaceChildren(...lanes);
}

function showSwaps(swaps) {
  const latest = swaps.slice(-12).reverse();
  const longest = Math.max(1, ...latest.map((swap) => swap.total_ms));
  byId("swaps").replaceChildren(
    ...latest.map((swap) => {
      const item = element("li");
      const phases = PHASES.filter((phase) => swap[`${phase}_ms`] > 0);
      const told = phases.map((phase) => `${phase} ${seconds(swap[`${phase}_ms`] / 1000)}`).join(", ");
      const token = swap.first_token_ms === null ? "" : `, first byte ${seconds(swap.first_token_ms / 1000)} later`;
      const from = swap.from.length ? swap.from.join(", ") : "nobody";
      const text = `${swap.number}. ${from} → ${swap.to || "nobody"} (${swap.cause}), ${seconds(swap.total_ms / 1000)}: ${told}${token}`;
      item.append(element("span", text));
      if (swap.result !== "ok") item.append(element("div", `${swap.result}: ${swap.error}`, "failed"));
      const bar = element("div", undefined, "bar");
      bar.setAttribute("aria-hidden", "true");
      bar.style.width = `${(100 * swap.total_ms) / longest}%`;
      for (const phase of phases) {
        const part = element("span", undefined, phase);
        part.style.width = `${(100 * swap[`${phase}_ms`]) / swap.total_ms}%`;
        bar.append(part);
      }
      item.append(bar);
      return item;
    }),
  );
}

function note(text, failed) {
  const log = byId("log");
  log.prepend(element("li", `${new Date().toLocaleTimeString()} ${text}`, failed ? "failed" : ""));
  while (log.children.length > MAX_LOG) log.lastChild.remove();
}

function told(event) {
  switch (event.type) {
    case "StateChanged": return `${event.member}: ${event.old} → ${event.new}${event.reason ? ` (${event.reason})` : ""}`;
    case "SwapDone": return `swap ${event.swap.number} done: ${event.swap.result}`;
    case "CanaryRan": return `${event.member}: canary ${event.result} ${event.evidence}`;
    case "RequestsCut": return `${event.member}: ${event.count} requests cut`;
    case "RequestRefused": return `${event.member}: refused ${event.code}`;
    default: return "";
  }
}

async function refresh() {
  try {
    const [list, swaps, metrics] = await Promise.all(
      ["/api/pool/members", "/api/pool/swaps", "/metrics"].map((path) => ask(path)),
    );
    const pool = await list.json();
    const first = members.length === 0;
    members = pool.members;
    const past = (await swaps.json()).swaps;
    track();
    if (first) recall(past);
    showMembers();
    showMemory(await metrics.text());
    showSwaps(past);
    showTimeline();
    byId("login").hidden = true;
    const awake = members.filter((member) => member.state === "ready").map((member) => member.name);
    say(`${pool.ready ? "up" : "starting"}; awake: ${awake.join(", ") || "nobody"}`);
  } catch (error) {
    say(error instanceof TypeError ? "the server does not answer; trying again" : error.message);
  }
}

async function listen() {
  for (;;) {
    try {
      const reader = (await ask("/api/events")).body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          if (!part.startsWith("data: ")) continue;
          const event = JSON.parse(part.slice(6));
          const text = told(event);
          if (text) note(text, event.type === "RequestRefused" || event.type === "RequestsCut" || event.new === "failed");
          if (event.type === "StateChanged" || event.type === "SwapDone") refresh();
        }
      }
    } catch (error) {
      if (!(error instanceof TypeError)) say(error.message);
    }
    await new Promise((resume) => setTimeout(resume, REFRESH_MS));
  }
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem("key", key);
  byId("key").value = "";
  refresh();
});
refresh();
setInterval(refresh, REFRESH_MS);
listen();
