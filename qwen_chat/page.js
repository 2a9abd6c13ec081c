// What the page does by itself, so that nothing waits for the server that need not.
// Each function of chatPage is the `js` of an event in ui.py: it takes the values of the event's
// inputs and returns those of its outputs; an empty list leaves everything as it is.
// CHAT, set before this, has the words, presets and settings that ui.py hands over.
(() => {
  const TYPING_PAUSE = 150; // milliseconds without a key before the text is handed over
  const MOST_TYPED = 100_000; // characters; a longer text fits no usual window, so nothing of it can be computed ahead
  const SAME = { __type__: "update" };
  const STOP = { ...SAME, submit_btn: false, stop_btn: true };
  const SEND = { ...SAME, submit_btn: true, stop_btn: false };

  const chinese = navigator.language.toLowerCase().startsWith("zh");
  CHAT.word = CHAT.words[chinese ? "zh" : "en"];
  document.documentElement.lang = CHAT.word.lang;

  // By this number the server finds what is cached of this browser's conversations, after a reload too.
  if (!/\bqwen-chat-browser=[0-9a-f]{32}\b/.test(document.cookie)) {
    const bytes = crypto.getRandomValues(new Uint8Array(16));
    const number = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    document.cookie = `qwen-chat-browser=${number}; max-age=31536000; SameSite=Strict; path=${location.pathname}`;
  }

  const find = (selector) => document.querySelector(selector);
  const input = () => find("#box textarea");
  const answering = () => Boolean(find("[data-testid=stop-button]"));
  const fromUser = (message) => message?.role === "user";
  const isStatus = (message) => message?.metadata?.id === "status";
  const question = (text) => ({ role: "user", content: [{ type: "text", text }], metadata: null, options: null });
  const textOf = (message) => message.content.map((part) => part.text ?? "").join("");
  const plain = (chat) => chat.map((message) => (message.options?.length ? { ...message, options: null } : message));

  // The chat without what followed the newest message of the person.
  const unanswered = (chat) => chat.slice(0, chat.findLastIndex(fromUser) + 1);

  // A stopped answer can be gone on with; one without figures was stopped.
  const stopped = (message) => message && !fromUser(message) && !message.metadata?.id && !message.metadata?.log;
  const withMore = (chat) => {
    if (!stopped(chat.at(-1)) || !textOf(chat.at(-1)).trim()) return chat;
    return [...chat.slice(0, -1), { ...chat.at(-1), options: [{ label: CHAT.word.continue, value: "continue" }] }];
  };

  // The newest text stays in sight, however much comes at once, until the person scrolls away from it.
  const LOG = "#chat .bubble-wrap";
  let follow = true;
  const grown = new ResizeObserver(() => {
    const log = find(LOG);
    if (follow && log) log.scrollTop = log.scrollHeight;
  });
  const scrolled = ({ target }) => {
    if (target.matches?.(LOG)) follow = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
  };
  document.addEventListener("scroll", scrolled, true);

  // Shows each question as it was typed, not as the Markdown or HTML it might be read as, whenever Gradio renders it.
  let questions = [];
  const asTyped = () => {
    document.querySelectorAll("#chat .user-row").forEach((row, i) => {
      const shown = row.querySelector("[data-testid=user] .md");
      if (shown && questions[i] !== undefined && shown.textContent !== questions[i]) shown.textContent = questions[i];
    });
  };
  const rendered = new MutationObserver(asTyped);

  // Writes the figures of each answer where page.css shows them: beside it, not in it.
  let drawn = [];
  const NAMED = { "Copy message": "copy", "Copy conversation": "copy_all" }; // Gradio has these in English alone
  const draw = () => {
    asTyped();
    document.querySelectorAll("#chat button[title]").forEach((button) => {
      if (NAMED[button.title]) button.ariaLabel = button.title = CHAT.word[NAMED[button.title]];
    });
    const log = find(LOG)?.firstElementChild;
    if (log) grown.observe(log);
    if (log) rendered.observe(log, { childList: true, subtree: true, characterData: true });
    const answers = drawn.filter((message) => !fromUser(message));
    document.querySelectorAll("#chat .bot-row").forEach((row, i) => {
      const { id, log } = answers[i]?.metadata ?? {};
      row.dataset.kind = id ?? "answer";
      if (row.nextElementSibling?.matches(".message-buttons")) row.nextElementSibling.dataset.figures = (log ?? "").split("\n")[0];
    });
    window.chatText.draw(drawn);
  };
  const show = (chat) => {
    drawn = chat;
    questions = chat.filter(fromUser).map(textOf);
    requestAnimationFrame(draw);
    window.keptChats.save(chat.filter((message) => !isStatus(message)));
  };

  let instead = null; // the chat that took the place of one whose answer was on its way
  const begin = (chat, ...values) => {
    follow = true;
    instead = null;
    show(chat);
    return [...values, chat];
  };
  const SETTINGS = "qwen-chat.settings", DRAFT = "qwen-chat.draft"; // of this tab
  const remember = (name, value) => {
    try {
      sessionStorage.setItem(name, value);
    } catch {} // full: nothing here is worth a broken page
  };
  const focus = () => {
    if (matchMedia("(hover: hover)").matches) input()?.focus();
  };

  // The performance view is renewed while it can be seen: its tab is chosen, and the page is not in the background.
  const REFRESH = 1000; // milliseconds
  let watching = false;
  let beat;
  const refresh = () => find("#refresh")?.click();
  const refreshWhileSeen = () => {
    clearInterval(beat);
    if (!watching || document.hidden) return;
    refresh();
    beat = setInterval(refresh, REFRESH);
  };
  document.addEventListener("visibilitychange", refreshWhileSeen);

  window.chatPage = {
    send(text, chat) {
      if (answering()) return [];
      remember(DRAFT, "");
      if (text.trim()) return begin([...plain(chat), question(text)], { ...STOP, value: "" });
      return fromUser(chat.at(-1)) ? begin(chat, STOP) : [];
    },
    retry(chat) {
      return answering() ? [] : begin(unanswered(chat), STOP);
    },
    undo(text, chat) {
      const kept = unanswered(chat);
      if (answering() || !kept.length) return [];
      show(kept.slice(0, -1));
      return [{ ...SAME, value: text || textOf(kept.at(-1)) }, kept.slice(0, -1)];
    },
    begin() {
      follow = true;
      instead = null;
      return [STOP];
    },
    drawn(chat) {
      show(chat);
      return [];
    },
    // Another conversation takes the place of this one; its answer, if one is on its way, is stopped.
    turn(chat) {
      if (chat.length) window.keptChats.save(withMore(chat.filter((message) => !isStatus(message))));
      const next = window.keptChats.next();
      instead = answering() ? next : null;
      follow = true;
      show(next);
      focus();
      ahead();
      return [SAME, next];
    },
    end(chat) {
      soon();
      if (document.activeElement === document.body) focus();
      if (instead) return [SEND, instead]; // what was still on its way came back into the chat
      const left = withMore(isStatus(chat.at(-1)) ? chat.slice(0, -1) : chat);
      show(left);
      return [SEND, left];
    },
    watch() {
      watching = true;
      refreshWhileSeen();
      return [];
    },
    rest() {
      watching = false;
      refreshWhileSeen();
      return [];
    },
    restore() {
      const [text, chat] = [sessionStorage.getItem(DRAFT) ?? "", window.keptChats.reopened()];
      show(chat);
      if (chat.length) ahead();
      return [{ ...SAME, value: text }, chat];
    },
    preset(name) {
      return [CHAT.presets[name][chinese ? "zh" : "en"]];
    },
    keepSettings(...values) {
      remember(SETTINGS, JSON.stringify(values));
      return [];
    },
    restoreSettings() {
      return JSON.parse(sessionStorage.getItem(SETTINGS) ?? "[]");
    },
    resetSettings: () => CHAT.settings,
  };

  // Type-ahead: after a pause, the unsent text is handed over. Half-composed Chinese is not text yet.
  let timer;
  const ahead = () => setTimeout(() => answering() || find("#typed")?.click(), 2 * TYPING_PAUSE);
  const soon = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const text = input()?.value ?? "";
      if (!answering() && text.trim() && text.length <= MOST_TYPED) find("#typed")?.click();
    }, TYPING_PAUSE);
  };
  const typed = (event) => {
    if (!event.target.closest?.("#box")) return;
    remember(DRAFT, event.target.value.slice(0, MOST_TYPED)); // there is room for a few megabytes in all
    if (!event.isComposing) soon();
  };
  document.addEventListener("input", typed);
  document.addEventListener("compositionend", typed);

  // Keys: Escape stops; the arrow up in the empty box brings back what was asked, the arrow down goes forth again.
  let recalled = null; // how many questions back
  const recall = (step) => {
    const back = Math.min((recalled ?? 0) + step, questions.length);
    recalled = back > 0 ? back : null;
    const box = input();
    Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set.call(box, recalled ? questions.at(-back) : "");
    box.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const pressed = (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") return find("[data-testid=stop-button]")?.click();
    if (event.target !== input()) return;
    const { value } = event.target;
    const step = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    const untouched = recalled ? value === questions.at(-recalled) : value === "" && step === 1;
    if (!step) recalled = null;
    else if (untouched && questions.length && !answering()) {
      event.preventDefault();
      recall(step);
    }
  };
  document.addEventListener("keydown", pressed);

  // A page that goes away in the middle of an answer keeps what was written of it.
  const leave = () => {
    const rows = [...document.querySelectorAll("#chat .bot-row")], row = rows.at(-1);
    if (fromUser(drawn.at(-1)) && rows.length === drawn.filter((message) => !fromUser(message)).length) return; // not begun
    const text = row?.querySelector(".status") ? "" : row?.querySelector("[data-testid=bot]")?.innerText.trim();
    if (!answering() || !text || !drawn.length) return;
    const written = { role: "assistant", content: [{ type: "text", text }], metadata: { log: "" }, options: null };
    window.keptChats.save(withMore([...unanswered(drawn), written]));
  };
  addEventListener("pagehide", leave);

  // Names for what has only a picture.
  const named = () => {
    for (const [selector, name] of [["#box .submit-button", "send"], ["#box .stop-button", "stop"], [".toggle-button", "menu"]]) {
      const button = find(selector);
      if (button && button.title !== CHAT.word[name]) button.ariaLabel = button.title = CHAT.word[name];
    }
  };
  new MutationObserver(named).observe(document, { childList: true, subtree: true });
})();
