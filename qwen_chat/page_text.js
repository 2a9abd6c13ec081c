// Long text on the page: files whose text goes into the box, the size of what is in it, and the line in
// the chat above which the model sees nothing any more.
(() => {
  const MOST_BYTES = 1_000_000; // of a file
  const SAMPLE = 8_000; // characters; of a longer text only three samples are sent to be counted
  const NOTICEABLE = 100; // characters; a shorter text fits any window
  const PAUSE = 300; // milliseconds without a key before the text is counted

  const find = (selector) => document.querySelector(selector);
  const area = () => find("#box textarea");

  // Files

  const say = (text) => {
    const note = find("#attach [role=alert]");
    if (note) note.textContent = text;
  };

  class Refused extends Error {}

  // The text of a file in one of the encodings that text files have; control characters are in no text.
  const decode = (bytes) => {
    const mark = bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16le" : bytes[0] === 0xfe && bytes[1] === 0xff ? "utf-16be" : null;
    for (const encoding of mark ? [mark] : ["utf-8", "gb18030"]) {
      try {
        const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
        if (!/[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]/.test(text)) return text;
      } catch {} // another one, perhaps
    }
    throw new Refused(CHAT.word.file_binary);
  };

  const read = async (file) => {
    if (file.size > MOST_BYTES) throw new Refused(CHAT.word.file_large);
    let bytes;
    try {
      bytes = new Uint8Array(await file.arrayBuffer());
    } catch {
      throw new Refused(CHAT.word.file_unreadable); // a folder, or a file that is gone
    }
    return decode(bytes);
  };

  // The text between fences of more backticks than are in it, below the file's name.
  const fenced = (name, text) => {
    const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((ticks) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}\n${fence}\n${text.replaceAll("\r\n", "\n").replace(/\n$/, "")}\n${fence}\n`;
  };

  const insert = (text) => {
    const box = area();
    const { value, selectionStart: at } = box;
    const broken = at > 0 && value[at - 1] !== "\n" ? "\n\n" : "";
    box.setRangeText(broken + text, at, box.selectionEnd, "end");
    box.dispatchEvent(new Event("input", { bubbles: true }));
    box.focus();
  };

  const take = async (files) => {
    say("");
    for (const file of files) {
      try {
        insert(fenced(file.name, await read(file)));
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
        say(error.message.replace("{name}", () => file.name));
      }
    }
  };

  const hasFiles = (transfer) => transfer && [...transfer.types].includes("Files");
  const taken = (event) => {
    event.preventDefault();
    event.stopPropagation();
  };
  document.addEventListener(
    "paste",
    (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length || event.clipboardData.getData("text/plain")) return; // an office program adds a picture to its text
      taken(event);
      take(files);
    },
    true,
  );
  for (const kind of ["dragenter", "dragover"]) {
    document.addEventListener(kind, (event) => hasFiles(event.dataTransfer) && taken(event), true);
  }
  document.addEventListener(
    "drop",
    (event) => {
      if (!hasFiles(event.dataTransfer)) return;
      taken(event);
      take([...event.dataTransfer.files]);
    },
    true,
  );
  document.addEventListener("click", (event) => event.target.closest?.("#attach button") && find("#attach input").click());
  document.addEventListener("change", ({ target }) => {
    if (!target.matches?.("#attach input")) return;
    take([...target.files]);
    target.value = ""; // so that the same file can be chosen again
  });

  // Size

  let timer;
  const changed = () => {
    const text = area()?.value ?? "";
    document.body.classList.toggle("short", text.length < NOTICEABLE);
    clearTimeout(timer);
    if (text.length >= NOTICEABLE) timer = setTimeout(() => find("#sized")?.click(), PAUSE);
  };
  const typed = ({ target, isComposing }) => {
    if (isComposing || !target.closest?.("#box")) return;
    say("");
    changed();
  };
  document.addEventListener("input", typed);
  document.addEventListener("compositionend", typed);

  // The line

  const isAnswered = (message) => message.role === "assistant" && !["status", "notice"].includes(message.metadata?.id);
  const textOf = (message) => message.content.map((part) => part.text ?? "").join("");

  // Where in the chat each round begins, as the model counts them: a refused question belongs to none, and
  // questions in a row are one.
  const rounds = (chat) => {
    const read = [];
    chat.forEach((message, at) => {
      if (message.metadata?.id === "notice" && read.at(-1)?.role === "user") read.pop();
      if (message.role === "user" || (isAnswered(message) && textOf(message))) read.push({ role: message.role, at });
    });
    return read.filter(({ role }, i) => role === "user" && read[i - 1]?.role !== "user").map(({ at }) => at);
  };

  const line = (chat) => {
    const [, dropped, label] = (chat.findLast((message) => message.metadata?.log)?.metadata.log ?? "").split("\n");
    const first = dropped ? rounds(chat)[Number(dropped)] : undefined;
    const number = first === undefined ? -1 : chat.slice(0, first).filter((message) => message.role === "user").length;
    document.querySelectorAll("#chat .user-row").forEach((row, i) => {
      if (i === number) row.dataset.line = label;
      else delete row.dataset.line;
    });
  };

  window.chatText = {
    // What is sent to be counted: the text, or samples of a long one, and how long it is.
    sample(text) {
      const starts = text.length <= 3 * SAMPLE ? [] : [0, Math.floor((text.length - SAMPLE) / 2), text.length - SAMPLE];
      const samples = starts.length ? starts.map((start) => text.slice(start, start + SAMPLE)) : [text];
      return [JSON.stringify({ samples, length: text.length })];
    },
    draw(chat) {
      changed(); // sending empties the box
      line(chat);
      const button = find("#attach button");
      if (button) button.title = button.ariaLabel = CHAT.word.attach;
    },
  };
})();
