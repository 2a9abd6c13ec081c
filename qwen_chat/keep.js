// Conversations are kept in this browser's localStorage, and nowhere else.
// Each is {id, title, named, at, messages}; a message is {role, text, kind, figures, more}.
(() => {
  const STORE = "qwen-chat.conversations"; // of this browser
  const OPEN = "qwen-chat.open"; // of this tab: the conversation it shows
  const FORMAT = "qwen-chat conversations 1"; // of an exported file
  const TITLE = 60; // characters
  const word = (name, values = {}) => CHAT.word[name].replace(/\{(\w+)\}/g, (_, key) => values[key]);

  // The store. Every tab writes to it, so it is read anew each time.
  const all = () => {
    try {
      const kept = JSON.parse(localStorage.getItem(STORE) ?? "[]");
      return Array.isArray(kept) ? kept : [];
    } catch {
      return [];
    }
  };
  const write = (kept) => {
    try {
      localStorage.setItem(STORE, JSON.stringify(kept.sort((a, b) => b.at - a.at)));
      say("");
    } catch {
      say(word("store_full"));
      const below = document.querySelector("#attach [role=alert]"); // the drawer may be closed
      if (below) below.textContent = word("store_full");
      return false;
    } finally {
      list();
    }
    return true;
  };
  const change = (id, edit) => write(all().map((each) => (each.id === id ? { ...each, ...edit } : each)));

  // A conversation as Gradio has it, and as it is kept.
  const kept = ({ role, content, metadata, options }) => ({
    role,
    text: content.map((part) => part.text ?? "").join(""),
    ...(metadata?.id && { kind: metadata.id }),
    ...(metadata?.log && { figures: metadata.log }),
    ...(options?.length && { more: true }),
  });
  const shown = ({ role, text, kind, figures, more }) => ({
    role,
    content: [{ type: "text", text }],
    metadata: role === "user" ? null : { log: figures ?? "", ...(kind && { id: kind }) },
    options: more ? [{ label: word("continue"), value: "continue" }] : null,
  });
  const titleOf = (messages) => {
    const text = messages.find(({ role }) => role === "user")?.text.trim().replace(/\s+/g, " ") ?? "";
    return text.length > TITLE ? `${text.slice(0, TITLE)}…` : text;
  };

  let id = sessionStorage.getItem(OPEN) || null;
  let deleted = false; // the conversation that is still shown was
  let seen = 0; // when this tab last read or wrote it
  let wanted = null; // what the next turn opens
  const turnTo = (next) => {
    wanted = next;
    document.querySelector("#turn").click();
    if (matchMedia("(max-width: 768px)").matches) document.querySelector("#side.open .toggle-button")?.click();
  };
  const remember = () => {
    try {
      sessionStorage.setItem(OPEN, id ?? "");
    } catch {} // full; what is said of localStorage is enough
  };
  const opened = (next) => {
    id = next;
    deleted = false;
    remember();
    const found = all().find((each) => each.id === id);
    seen = found?.at ?? 0;
    list();
    return found ? found.messages.map(shown) : [];
  };

  // Everything in it was taken back.
  const drop = () => {
    if (!id) return;
    write(all().filter((each) => each.id !== id));
    id = null;
    remember();
  };

  window.keptChats = {
    save(chat) {
      if (deleted) return;
      if (!chat.length) return drop();
      const messages = chat.map(kept);
      const others = all();
      let before = others.find((each) => each.id === id);
      if (before && JSON.stringify(before.messages) === JSON.stringify(messages)) return;
      if (before && before.at !== seen) {
        id = null; // another tab went on with it in its own way: both are kept
        before = undefined;
      }
      id ??= crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
      remember();
      const title = before?.named ? before.title : titleOf(messages);
      seen = Math.max(Date.now(), seen + 1);
      write([...others.filter((each) => each.id !== id), { ...before, id, title, at: seen, messages }]);
    },
    // The chat that takes the place of this one: the one that was chosen, else an empty one.
    next() {
      const next = wanted;
      wanted = null;
      return opened(next);
    },
    reopened: () => opened(id),
  };

  // The list
  const element = (name, options = {}, ...children) => {
    const made = Object.assign(document.createElement(name), options);
    made.append(...children);
    return made;
  };
  const button = (name, text, onclick) => element("button", { type: "button", className: name, textContent: text, onclick });
  const icon = (name, picture, label, onclick) => Object.assign(button(name, picture, onclick), { title: label, ariaLabel: label });

  const row = (each) => {
    const title = each.title || word("untitled");
    const open = button("open", title, () => each.id !== id && turnTo(each.id));
    open.title = `${title}\n${new Date(each.at).toLocaleString(CHAT.word.lang)}`;
    const item = element("li", { className: each.id === id ? "current" : "" }, open);
    item.append(icon("rename", "✎", word("rename"), () => rename(item, each)), icon("delete", "✕", word("delete"), () => remove(item, each)));
    return item;
  };
  const rename = (item, each) => {
    const field = element("input", { value: each.title, ariaLabel: word("rename"), maxLength: 200 });
    let done = false;
    const end = (keep) => {
      if (done) return;
      done = true;
      const title = field.value.trim();
      if (keep && title) change(each.id, { title, named: true });
      else list();
    };
    field.onblur = () => end(true);
    field.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key === "Escape") end(false);
    };
    item.replaceChildren(field);
    field.select();
  };
  const remove = (item, each) => {
    const yes = button("yes", word("yes"), () => {
      write(all().filter(({ id }) => id !== each.id));
      if (each.id === id) {
        deleted = true;
        turnTo(null);
      }
    });
    item.replaceChildren(element("span", { textContent: word("sure") }), yes, button("no", word("no"), list));
    yes.focus();
  };

  // Files
  const save = (name, type, text) => {
    const link = element("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  };
  const fileName = ({ title }) => `${title.replace(/[\\/:*?"<>|…]+/g, " ").trim() || "conversation"}.md`;
  const MARK = /^<!-- qwen-chat (user|assistant|notice) -->$/;
  const asMarkdown = ({ title, messages }) => {
    const body = messages.map(({ role, kind, text }) => {
      const lines = text.split("\n").map((line) => (/^\\*<!-- qwen-chat /.test(line) ? `\\${line}` : line));
      return `<!-- qwen-chat ${kind ?? role} -->\n**${word(role === "user" ? "you" : "bot")}**\n\n${lines.join("\n")}\n`;
    });
    return `# ${title || word("untitled")}\n\n${body.join("\n")}`;
  };
  const fromMarkdown = (text) => {
    const [first, ...lines] = text.replace(/\r\n/g, "\n").split("\n");
    const messages = [];
    for (const line of lines) {
      const mark = line.match(MARK);
      if (mark) messages.push({ kind: mark[1], lines: [] });
      else messages.at(-1)?.lines.push(line.replace(/^\\(\\*<!-- qwen-chat )/, "$1"));
    }
    if (!messages.length) throw new Error("no messages");
    const title = first.replace(/^# /, "");
    return [{ title, named: true, messages: messages.map(({ kind, lines }) => ({
      role: kind === "user" ? "user" : "assistant",
      ...(kind === "notice" && { kind }),
      text: lines.slice(2, -1).join("\n").replace(/\n$/, ""),
    })) }];
  };
  const isText = (value) => typeof value === "string";
  const isMessage = (each) => ["user", "assistant"].includes(each?.role) && isText(each.text);
  const fromJson = (text) => {
    const { format, conversations } = JSON.parse(text);
    if (format !== FORMAT || !conversations.every(({ messages }) => messages.length && messages.every(isMessage))) throw new Error("not ours");
    return conversations;
  };
  const clean = ({ role, text, kind, figures, more }) => ({
    role,
    text,
    ...(kind === "notice" && { kind }),
    ...(isText(figures) && { figures }),
    ...(more === true && { more }),
  });
  const bring = async (file) => {
    let found;
    try {
      const text = await file.text();
      found = file.name.toLowerCase().endsWith(".json") ? fromJson(text) : fromMarkdown(text);
    } catch {
      return say(word("not_ours", { name: file.name }));
    }
    const taken = found.map(({ title, named, at, messages }, i) => ({
      id: `${Date.now()}-${Math.random()}`,
      title: isText(title) ? title.slice(0, 200) : titleOf(messages),
      named: Boolean(named),
      at: Number.isFinite(at) ? at : Date.now() - i,
      messages: messages.map(clean),
    }));
    if (write([...taken, ...all()])) say(word("imported", { count: taken.length }));
  };

  // Drawing
  const say = (text) => {
    const line = document.querySelector("#kept .say");
    if (line) line.textContent = text;
  };
  const list = () => document.querySelector("#kept ul")?.replaceChildren(...rows());
  const rows = () => {
    const found = all().map(row);
    return found.length ? found : [element("li", { className: "none", textContent: word("none_kept") })];
  };
  const build = (place) => {
    const file = element("input", { type: "file", accept: ".json,.md", hidden: true });
    file.onchange = () => {
      if (file.files.length) bring(file.files[0]);
      file.value = "";
    };
    const current = () => all().find((each) => each.id === id);
    place.append(
      button("new", `＋ ${word("new_chat")}`, () => turnTo(null)),
      element("h2", { textContent: word("kept") }),
      element("p", { className: "where", textContent: word("kept_where") }),
      element("ul"),
      element("p", { className: "say", role: "status" }),
      element("div", { className: "files" },
        button("md", word("export_md"), () => current() ? save(fileName(current()), "text/markdown", asMarkdown(current())) : say(word("nothing_open"))),
        button("json", word("export_json"), () => save("conversations.json", "application/json", JSON.stringify({ format: FORMAT, conversations: all() }, null, 1))),
        button("import", word("import"), () => file.click()), file),
    );
    list();
  };
  const waiting = new MutationObserver(() => {
    const place = document.querySelector("#kept");
    if (!place || place.childElementCount) return;
    build(place);
  });
  waiting.observe(document, { childList: true, subtree: true });
  window.addEventListener("storage", ({ key }) => {
    if (key !== STORE) return;
    if (seen && !deleted && !all().some((each) => each.id === id)) {
      deleted = true;
      say(word("deleted_elsewhere"));
    }
    list();
  });
})();
