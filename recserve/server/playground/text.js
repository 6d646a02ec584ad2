// The tab Text: completions and chats as they are written, with the tokens that a draft proposed in colour,
// the thoughts before a turn, and the calls of tools, whose results the next messages give.

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

/** Calls of the last turn that have no result yet. */
function openCalls() {
  const last = messages.findLastIndex((message) => message.role === "assistant");
  const answered = new Set(messages.slice(last + 1).map((message) => message.tool_call_id));
  return last < 0 ? [] : (messages[last].tool_calls || []).filter((call) => !answered.has(call.id));
}

function nameOfCall(id) {
  const calls = messages.flatMap((message) => message.tool_calls || []);
  return calls.find((call) => call.id === id)?.function.name || "a call";
}

function callBox(call) {
  return element("code", { class: "call", text: `${call.function.name}(${call.function.arguments})` });
}

function turn(message) {
  const who = { user: "you", tool: `result of ${nameOfCall(message.tool_call_id)}` }[message.role] || model.id;
  const kind = message.role === "assistant" ? "assistant" : "user";
  return element("div", { class: `turn turn-${kind}` }, element("span", { class: "who", text: who }),
    message.reasoning_content && element("span", { class: "thoughts", text: message.reasoning_content }),
    element("span", { text: message.content || "" }), ...(message.tool_calls || []).map(callBox));
}

/** Clears the sheet and shows the conversation again. */
function sheet() {
  byId("written").replaceChildren(...(modeOf() === "chat" ? messages.map(turn) : []));
}

/** Says what the input is for: a call waits for its result. */
function hint() {
  const chat = modeOf() === "chat", [call] = chat ? openCalls() : [];
  byId("text-hint").textContent = chat ? "Enter sends, Shift+Enter starts a line, Esc stops" : "Ctrl+Enter writes, Esc stops";
  byId("prompt").placeholder = call ? `The result of ${call.function.name}` : chat ? "Your message" : "The beginning of a text";
}

function setMode() {
  const chat = modeOf() === "chat";
  byId("system-box").hidden = !chat;
  byId("tools-box").hidden = !chat;
  byId("text-go").textContent = chat ? "Send" : "Write";
  if (chat !== wasChat) byId("prompt").value = chat ? "" : byId("prompt-state").value;
  wasChat = chat;
  hint();
  sheet();
}

/** Returns the JSON of a field; undefined if it is empty. Throws an error that names the field. */
function jsonOf(name, text) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}

function bodyOf(values, prompt) {
  const body = { model: model.id, max_tokens: Number(values.length), temperature: Number(values.heat), stream: true,
    stream_options: { include_usage: true, include_token_sources: true }, speculation: { drafter: values.drafter } };
  if (values.nodes && values.drafter !== "none") body.speculation.num_tokens = Number(values.nodes);
  if (values.seed) body.seed = Number(values.seed);
  const schema = jsonOf("JSON schema", values.schema);
  if (schema !== undefined) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (values.mode !== "chat") return { ...body, prompt };
  const tools = jsonOf("Tools", values.tools);
  if (tools !== undefined) Object.assign(body, { tools, tool_choice: values.calls });
  const system = values.system.trim() ? [{ role: "system", content: values.system.trim() }] : [];
  return { ...body, messages: [...system, ...messages] };
}

/** The answer that is being written: its parts on the sheet, and the message that they make. */
class Answer {
  constructor(box) {
    this.thoughts = element("span", { class: "thoughts", hidden: true });
    this.text = element("span");
    this.calls = [];
    this.box = box;
    box.append(this.thoughts, this.text);
  }

  /** Adds a piece. Tokens have colours where the piece is content only: tags of thoughts and calls are not shown. */
  add(choice) {
    const delta = choice.delta || { content: choice.text };
    const tokens = choice.token_sources || [];
    if (delta.reasoning_content) {
      this.thoughts.hidden = false;
      this.thoughts.append(delta.reasoning_content);
    }
    if (tokens.map((token) => token.text).join("") === delta.content) {
      for (const token of tokens) {
        if (token.text) this.text.append(element("span", { class: token.source === "draft" ? "drafted" : "", text: token.text }));
      }
    } else if (delta.content) this.text.append(element("span", { text: delta.content }));
    for (const part of delta.tool_calls || []) {
      if (!this.calls[part.index]) {
        this.calls[part.index] = { call: { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } } };
        this.calls[part.index].box = element("code", { class: "call" });
        this.box.append(this.calls[part.index].box);
      }
      const { call, box } = this.calls[part.index];
      call.function.arguments += part.function.arguments;
      box.replaceWith(this.calls[part.index].box = callBox(call));
    }
    scrollDown();
  }

  /** Returns the message; null if nothing was written. */
  message() {
    const content = this.text.textContent, calls = this.calls.map(({ call }) => call);
    if (!content && !calls.length && !this.thoughts.textContent) return null;
    return { role: "assistant", content, ...(calls.length && { tool_calls: calls }), ...(this.thoughts.textContent && { reasoning_content: this.thoughts.textContent }) };
  }
}

function scrollDown() {
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
    const [call] = openCalls();
    messages.push(call ? { role: "tool", tool_call_id: call.id, content: prompt } : { role: "user", content: prompt });
    byId("prompt").value = "";
    if (openCalls().length) {
      hint();
      return sheet();
    }
  }
  let body;
  try {
    body = bodyOf(values, prompt);
  } catch (error) {
    if (chat) byId("prompt").value = messages.pop().content;
    throw error;
  }
  showCurl(byId("text-request"), "POST", chat ? "/v1/chat/completions" : "/v1/completions", [body]);
  sheet();
  const box = chat ? turn({ role: "assistant", content: "" }) : element("div", {}, element("span", { class: "given", text: prompt }));
  const answer = new Answer(box);
  byId("written").append(box);
  byId("text-facts").replaceChildren();
  running = new AbortController();
  byId("text-go").disabled = true;
  byId("text-stop").disabled = false;
  const began = performance.now();
  try {
    await stream(chat ? "/v1/chat/completions" : "/v1/completions", body, running.signal, (chunk) => {
      for (const choice of chunk.choices) answer.add(choice);
      if (chunk.usage) tellFacts(chunk.usage, chunk.metrics, (performance.now() - began) / 1e3);
    });
  } finally {
    running = null;
    byId("text-go").disabled = false;
    byId("text-stop").disabled = true;
    const message = answer.message();
    if (chat && message) messages.push(message);
    else if (chat) takeBack(box);
    hint();
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
      hint();
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
