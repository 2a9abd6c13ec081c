// What the page does by itself, so that nothing waits for the server that need not.
// Each function of chatPage is the `js` of an event in ui.py: it takes the values of the event's
// inputs and returns those of its outputs; an empty list leaves everything as it is.
(() => {
  const TYPING_PAUSE = 150; // milliseconds without a key before the text is handed over
  const STOP = { __type__: "update", submit_btn: false, stop_btn: true };
  const SEND = { __type__: "update", submit_btn: true, stop_btn: false };

  const find = (selector) => document.querySelector(selector);
  const answering = () => Boolean(find("[data-testid=stop-button]"));
  const fromUser = (message) => message?.role === "user";
  const isStatus = (message) => message?.metadata?.id === "status";
  const question = (text) => ({ role: "user", content: [{ type: "text", text }], metadata: null, options: null });
  const textOf = (message) => message.content.map((part) => part.text ?? "").join("");

  // The chat without what followed the newest message of the person.
  const unanswered = (chat) => chat.slice(0, chat.findLastIndex(fromUser) + 1);

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

  let cleared = false; // since the last question
  const begin = (...values) => {
    follow = true;
    cleared = false;
    return values;
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
      if (text.trim()) return begin({ ...STOP, value: "" }, [...chat, question(text)]);
      return fromUser(chat.at(-1)) ? begin(STOP, chat) : [];
    },
    retry(chat) {
      return answering() ? [] : begin(STOP, unanswered(chat));
    },
    undo(text, chat) {
      const kept = unanswered(chat);
      if (answering() || !kept.length) return [];
      return [{ __type__: "update", value: text || textOf(kept.at(-1)) }, kept.slice(0, -1)];
    },
    begin() {
      return begin(STOP);
    },
    clear() {
      cleared = true;
      return [];
    },
    end(chat) {
      soon();
      if (document.activeElement === document.body && matchMedia("(hover: hover)").matches) find("#box textarea")?.focus();
      if (cleared) return [SEND, []]; // what was still on its way came back into the chat
      return isStatus(chat.at(-1)) ? [SEND, chat.slice(0, -1)] : [SEND];
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
    // Writes the figures of each answer where page.css shows them: beside it, not in it.
    changed(chat) {
      questions = chat.filter(fromUser).map(textOf);
      requestAnimationFrame(() => {
        asTyped();
        const log = find(LOG)?.firstElementChild;
        if (log) grown.observe(log);
        if (log) rendered.observe(log, { childList: true, subtree: true, characterData: true });
        const answers = chat.filter((message) => !fromUser(message));
        document.querySelectorAll("#chat .bot-row").forEach((row, i) => {
          const { id, log } = answers[i]?.metadata ?? {};
          row.dataset.kind = id ?? "answer";
          if (row.nextElementSibling?.matches(".message-buttons")) row.nextElementSibling.dataset.figures = log ?? "";
        });
      });
      return [];
    },
  };

  // Type-ahead: after a pause, the unsent text is handed over. Half-composed Chinese is not text yet.
  let timer;
  const soon = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (!answering() && find("#box textarea")?.value.trim()) find("#typed")?.click();
    }, TYPING_PAUSE);
  };
  const typed = (event) => {
    if (!event.isComposing && event.target.closest?.("#box")) soon();
  };
  document.addEventListener("input", typed);
  document.addEventListener("compositionend", typed);
})();
