// The tab Text: completions and chats as they are written, with the tokens that a draft proposed in colour.

import { badge, byId, element, options, percent } from "./dom.js";
import { stream } from "./api.js";
import { barChart } from "./charts.js";
import { showCurl } from "./recommend.js";

const EVERYDAY = "Once upon a time";
let model = null;
let running = null;
let messages = [];
let wasChat = false;

const modeOf = () => byId("text-form").elements.mode.value;

function turn(role, text) {
  return element("div", { class: `turn turn-${role}` }, element("span", { class: "who", text: role === "user" ? "you" : model.id }), element("span", { text }));
}

/** Clears the sheet and shows the conversation again. */
function sheet() {
  byId("written").replaceChildren(...(modeOf() === "chat" ? messages.map((message) => turn(message.role, message.content)) : []));
}

function setMode() {
  const chat = modeOf() === "chat";
  byId("system-box").hidden = !chat;
  byId("text-go").textContent = chat ? "Send" : "Write";
  byId("text-hint").textContent = chat ? "Enter sends, Shift+Enter starts a line, Esc stops" : "Ctrl+Enter writes, Esc stops";
  if (chat !== wasChat) byId("prompt").value = chat ? "" : byId("prompt-state").value;
  wasChat = chat;
  byId("prompt").placeholder = chat ? "Your message" : "The beginning of a text";
  sheet();
}

function bodyOf(values, prompt) {
  const body = { model: model.id, max_tokens: Number(values.length), temperature: Number(values.heat), stream: true,
    stream_options: { include_usage: true, include_token_sources: true }, speculation: { drafter: values.drafter } };
  if (values.nodes && values.drafter !== "none") body.speculation.num_tokens = Number(values.nodes);
  if (values.seed) body.seed = Number(values.seed);
  if (values.mode !== "chat") return { ...body, prompt };
  const system = values.system.trim() ? [{ role: "system", content: values.system.trim() }] : [];
  return { ...body, messages: [...system, ...messages] };
}

/** Appends a piece to the sheet, token by token. */
function append(into, choice) {
  for (const token of choice.token_sources || []) {
    if (token.text) into.append(element("span", { class: token.source === "draft" ? "drafted" : "", text: token.text }));
  }
  const all = byId("written");
  all.scrollTop = all.scrollHeight;
}

function tellFacts(usage, metrics, seconds) {
  const drafted = metrics?.speculative_decoding?.num_drafts ? metrics.speculative_decoding : null;
  byId("text-facts").replaceChildren(badge(`${usage.completion_tokens} tokens`), badge(`${(usage.completion_tokens / seconds).toFixed(0)} tokens/s`, "accent"),
    ...(drafted ? [badge(`${percent(drafted.draft_acceptance_rate)} accepted`, "good", `${drafted.num_accepted_tokens} of ${drafted.num_draft_tokens} draft tokens`),
      badge(`${drafted.mean_acceptance_length.toFixed(2)} tokens per drafted step`, "", "The token of the model itself included")] : []));
  byId("acceptance-card").hidden = !drafted;
  if (drafted) byId("acceptance").replaceChildren(barChart(drafted.per_position.map((value, at) => [String(at + 1), value]), "accepted tokens", "position in the draft"));
}

/** Removes a message that got no answer from the conversation, and puts it back into the input. */
function takeBack(box) {
  const { content } = messages.pop();
  byId("prompt").value ||= content;
  box.previousElementSibling?.remove();
  box.remove();
}

async function write(values) {
  const chat = values.mode === "chat";
  const prompt = byId("prompt").value;
  if (chat && !prompt.trim()) return;
  if (chat) {
    messages.push({ role: "user", content: prompt });
    byId("prompt").value = "";
  }
  const body = bodyOf(values, prompt);
  showCurl(byId("text-request"), "POST", chat ? "/v1/chat/completions" : "/v1/completions", [body]);
  sheet();
  const into = element("span");
  const box = chat ? turn("assistant", "") : element("div", {}, element("span", { class: "given", text: prompt }));
  box.append(into);
  byId("written").append(box);
  byId("text-facts").replaceChildren();
  running = new AbortController();
  byId("text-go").disabled = true;
  byId("text-stop").disabled = false;
  const began = performance.now();
  try {
    await stream(chat ? "/v1/chat/completions" : "/v1/completions", body, running.signal, (chunk) => {
      for (const choice of chunk.choices) append(into, choice);
      if (chunk.usage) tellFacts(chunk.usage, chunk.metrics, (performance.now() - began) / 1e3);
    });
  } finally {
    running = null;
    byId("text-go").disabled = false;
    byId("text-stop").disabled = true;
    if (chat && into.textContent) messages.push({ role: "assistant", content: into.textContent });
    else if (chat) takeBack(box);
  }
}

export const text = {
  start(app) {
    model = app.models.find((one) => one.recserve.drafters);
    byId("text-model").textContent = model.id;
    options(byId("drafter"), model.recserve.drafters);
    byId("drafter").value = model.recserve.default_drafter;
    byId("length").max = String(Math.min(512, model.max_model_len));
    const form = byId("text-form");
    const chat = [...form.elements.mode].find((field) => field.value === "chat");
    chat.disabled = !model.recserve.chat;
    byId("no-chat").hidden = model.recserve.chat;
    byId("prompt").value ||= model.recserve.example_prompt || EVERYDAY;
    byId("prompt-state").value = byId("prompt").value;
    setMode();
    if (form.dataset.bound) return;
    form.dataset.bound = "yes";
    for (const field of form.elements.mode) {
      field.addEventListener("change", setMode);
      field.addEventListener("restore", setMode);
    }
    // The address holds the prompt of a completion. A chat starts empty and is not in the address.
    byId("prompt-state").addEventListener("restore", () => { if (modeOf() !== "chat") byId("prompt").value = byId("prompt-state").value; });
    byId("prompt").addEventListener("input", () => { if (modeOf() !== "chat") byId("prompt-state").value = byId("prompt").value; });
    const go = () => {
      if (running) return;
      this.wanted = true;
      app.go("text");
    };
    byId("prompt-form").addEventListener("submit", (event) => { event.preventDefault(); go(); });
    form.addEventListener("submit", () => { this.wanted = true; }, { capture: true });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.isComposing) return;
      const sends = modeOf() === "chat" ? !event.shiftKey : event.ctrlKey || event.metaKey;
      if (!sends) return;
      event.preventDefault();
      go();
    });
    byId("text-stop").addEventListener("click", () => this.cancel());
    byId("text-clear").addEventListener("click", () => {
      this.cancel();
      messages = [];
      byId("prompt").value = "";
      byId("text-facts").replaceChildren();
      byId("acceptance-card").hidden = true;
      sheet();
      byId("prompt").focus();
    });
  },

  /** Writes when the user asked for it, and once when the tab opens for the first time. */
  async run(app, values) {
    const first = !byId("written").childElementCount && values.mode !== "chat" && byId("prompt").value;
    if (running || !(this.wanted || first)) return;
    this.wanted = false;
    await write(values);
  },

  cancel: () => running?.abort(),
  stop: () => running?.abort(),
};
