"""Every word that the page shows, in Chinese and in English, and how its figures are written."""

EN = {
    "lang": "en",
    "hello": "What would you like to know?",
    "placeholder": "Message",
    "chat_tab": "Chat",
    "view_tab": "Performance",
    "about": "qwen-chat {version} · {model} · llama.cpp",
    "profile": "profile {name}",
    "looking": "Looking for the model",
    "downloading": "Downloading {name}",
    "checking": "Checking {name}",
    "loading": "Loading model",
    "closed": "The server is shutting down",
    "fallback": "This is a stand-in: {model}. {reason}",
    "unreached": "{hosts} cannot be reached",
    "hosts_and": " and ",
    "waiting": "Waiting: {place} in line",
    "reading": "Reading your message: {read} of {total} tokens",
    "busy": "Too many people are waiting for an answer right now. Please try again in a moment.",
    "busy_own": "You have as many questions waiting as one person may. Please try again when one is answered.",
    "too_long": "This message is too long: {size} tokens, and the limit is {limit}. Please shorten it by {excess}.",
    "condensing": "Condensing part {number} of {count}",
    "condensed": ("the message was condensed from {before} to {after} tokens", "the message was condensed from {before} to {after} tokens in {parts} parts"),
    "size": "{size} / {window} tokens",
    "will_condense": "{size} / {window} tokens · will be condensed",
    "will_refuse": "{size} tokens · at most {limit}, {excess} too many",
    "attach": "Add a text file",
    "file_binary": "{name} is not a text file.",
    "file_large": "{name} is too large: at most 1 MB.",
    "file_unreadable": "{name} cannot be read.",
    "failed": "No answer: {reason}",
    "broken": "Something went wrong while answering. Please try again; the server's log says more.",
    "empty": "The model had nothing to say. Please try again.",
    "first_token": "first token {time}",
    "speed": "{speed} tokens/s",
    "window": "window {used} / {size} tokens",
    "reused": "{count} reused",
    "cut_off": "stopped at the limit of {count} tokens",
    "dropped": ("The model no longer sees the first round", "The model no longer sees the first {count} rounds"),
    "noted": ("The model has a short note of the first round", "The model has a short note of the first {count} rounds"),
    "view_empty": "No answer yet. Ask something in the chat, and you see here how fast it was.",
    "view_first": "First token",
    "view_first_hint": "until an answer begins, median of the last {count}",
    "view_speed": "Speed",
    "view_speed_hint": "about {words} words a second",
    "view_reused": "Reused",
    "view_reused_hint": "of what had to be read was computed before",
    "view_seconds": "{count} s",
    "view_rate": "{count} tokens/s",
    "view_scope": "Each bar is an answer; shown are the last {count} at most, of everybody who uses this server. Figures only, never texts.",
    "view_memory": "Memory",
    "view_cpu": "Processor",
    "view_of": "{used} of {all}",
    "view_cores": ("{used} of {count} core", "{used} of {count} cores"),
    "view_measuring": "measuring…",
    "view_engine": "Now: {running} answering, {waiting} waiting; conversations parked in memory: {parked} ({size})",
    "view_model": "Model",
    "view_file": "File",
    "view_quantised": "{size}, quantised to {kind}",
    "view_params": "Parameters in it",
    "view_millions": "{count} million",
    "view_window": "Window",
    "view_tokens": "{count} tokens",
    "view_threads": "Threads",
    "view_threads_of": "{threads} (usable cores: {cores})",
    "view_code": "Computes with",
    "view_uptime": "Running for",
    "view_time": ("{minutes} min", "{hours} h {minutes} min", "{days} d {hours} h"),
    "and": " · ",
    "continue": "Continue",
    "system_too_long": "The system prompt in the settings is too long for the window. Please shorten it.",
    "no_room": "The window is full: there is no room left to go on. Ask in a new message instead.",
    "setting": "These settings cannot be used: {faults}",
    "settings": "Settings of this tab",
    "preset_assistant": "Assistant",
    "preset_translator": "Translator",
    "preset_coder": "Coder",
    "preset_teacher": "Teacher",
    "reset": "Reset",
    "set_system_prompt": "System prompt",
    "info_system_prompt": "Empty: the one of config.yaml",
    "set_temperature": "Temperature",
    "info_temperature": "Higher is more varied, 0 always takes the likeliest",
    "set_top_p": "Top p",
    "info_top_p": "Choose among the likeliest, up to this share",
    "set_repeat_penalty": "Repeat penalty",
    "info_repeat_penalty": "1 is none",
    "set_max_tokens": "Longest answer",
    "info_max_tokens": "In tokens",
    "set_max_turns": "Rounds the model sees",
    "info_max_turns": "0: all that fit",
    "set_seed": "Seed",
    "info_seed": "-1: another each time",
    "new_chat": "New chat",
    "kept": "Conversations",
    "kept_where": "Kept in this browser alone",
    "none_kept": "None yet",
    "nothing_open": "No conversation is open",
    "deleted_elsewhere": "This conversation was deleted in another tab. It is not kept any more.",
    "untitled": "Untitled",
    "rename": "Rename",
    "delete": "Delete",
    "sure": "Delete it?",
    "yes": "Yes",
    "no": "No",
    "export_md": "Export as Markdown",
    "export_json": "Export all as JSON",
    "import": "Import",
    "imported": "{count} imported",
    "not_ours": "{name} is not an export of this page: a .json or .md file made here is needed",
    "store_full": "This browser's storage is full: this conversation is not kept. Export or delete some.",
    "you": "You",
    "bot": "Assistant",
    "copy": "Copy message",
    "copy_all": "Copy conversation",
    "send": "Send",
    "stop": "Stop",
    "menu": "Conversations and settings",
}
ZH = {
    "lang": "zh-CN",
    "hello": "想聊点什么？",
    "placeholder": "输入消息",
    "chat_tab": "对话",
    "view_tab": "性能",
    "about": "qwen-chat {version} · {model} · llama.cpp",
    "profile": "设备配置 {name}",
    "looking": "正在寻找模型",
    "downloading": "正在下载 {name}",
    "checking": "正在校验 {name}",
    "loading": "正在加载模型",
    "closed": "服务正在关闭",
    "fallback": "当前使用的是备用模型：{model}。{reason}",
    "unreached": "无法连接 {hosts}",
    "hosts_and": "、",
    "waiting": "排队中：第 {place} 位",
    "reading": "正在阅读你的消息：{read} / {total} 个词元",
    "busy": "现在等待回答的人太多了，请稍后再试。",
    "busy_own": "您排队的问题已达到每人上限，请等其中一个回答完再试。",
    "too_long": "这条消息太长了：共 {size} 个词元，上限是 {limit} 个。请缩短 {excess} 个后再发。",
    "condensing": "正在压缩第 {number} / {count} 部分",
    "condensed": ("消息已从 {before} 个词元压缩到 {after} 个", "消息已分 {parts} 部分从 {before} 个词元压缩到 {after} 个"),
    "size": "{size} / {window} 词元",
    "will_condense": "{size} / {window} 词元 · 将先分段压缩",
    "will_refuse": "{size} 词元 · 上限 {limit}，超出 {excess} 个",
    "attach": "添加文本文件",
    "file_binary": "{name} 不是文本文件。",
    "file_large": "{name} 太大，最大 1 MB。",
    "file_unreadable": "无法读取 {name}。",
    "failed": "无法回答：{reason}",
    "broken": "回答时出错了，请重试；详情见服务器日志。",
    "empty": "模型没有给出回答，请重试。",
    "first_token": "首字 {time}",
    "speed": "{speed} 词元/秒",
    "window": "窗口 {used} / {size} 词元",
    "reused": "复用 {count}",
    "cut_off": "已到 {count} 个词元的上限",
    "dropped": ("最早的 1 轮对话，模型已看不到", "最早的 {count} 轮对话，模型已看不到"),
    "noted": ("最早的 1 轮对话，模型只留有简短笔记", "最早的 {count} 轮对话，模型只留有简短笔记"),
    "view_empty": "还没有回答过。在对话里提个问题，这里就会显示回答得有多快。",
    "view_first": "首字时间",
    "view_first_hint": "从提问到开始回答，最近 {count} 次的中位数",
    "view_speed": "速度",
    "view_speed_hint": "约每秒 {words} 个字",
    "view_reused": "复用",
    "view_reused_hint": "要读的内容中，早已算好、无需重算的部分",
    "view_seconds": "{count} 秒",
    "view_rate": "{count} 词元/秒",
    "view_scope": "每根柱子是一次回答，最多显示本服务所有用户最近的 {count} 次。只有数字，不含任何文字内容。",
    "view_memory": "内存",
    "view_cpu": "处理器",
    "view_of": "{used} / {all}",
    "view_cores": ("{used} / {count} 核", "{used} / {count} 核"),
    "view_measuring": "测量中…",
    "view_engine": "现在：正在回答 {running} 个，排队 {waiting} 个；内存中暂存对话 {parked} 个（{size}）",
    "view_model": "模型",
    "view_file": "文件",
    "view_quantised": "{size}，量化为 {kind}",
    "view_params": "文件内参数",
    "view_millions": "{count}M",
    "view_window": "窗口",
    "view_tokens": "{count} 词元",
    "view_threads": "线程",
    "view_threads_of": "{threads} 个（可用 {cores} 核）",
    "view_code": "指令集",
    "view_uptime": "已运行",
    "view_time": ("{minutes} 分钟", "{hours} 小时 {minutes} 分钟", "{days} 天 {hours} 小时"),
    "and": " · ",
    "continue": "继续",
    "system_too_long": "设置里的系统提示太长，窗口放不下。请缩短它。",
    "no_room": "窗口已满，没有空间继续写了。请另发一条消息。",
    "setting": "这些设置不能使用：{faults}",
    "settings": "本标签页的设置",
    "preset_assistant": "助手",
    "preset_translator": "翻译",
    "preset_coder": "编程",
    "preset_teacher": "老师",
    "reset": "恢复默认",
    "set_system_prompt": "系统提示",
    "info_system_prompt": "留空则用 config.yaml 里的",
    "set_temperature": "温度",
    "info_temperature": "越高越多变；0 总取最可能的词",
    "set_top_p": "Top p",
    "info_top_p": "只在累计概率达到此值的词里选",
    "set_repeat_penalty": "重复惩罚",
    "info_repeat_penalty": "1 为不用",
    "set_max_tokens": "最长回答",
    "info_max_tokens": "词元数",
    "set_max_turns": "带上最近几轮",
    "info_max_turns": "0 为放得下的都带上",
    "set_seed": "随机种子",
    "info_seed": "-1 为每次不同",
    "new_chat": "新对话",
    "kept": "历史对话",
    "kept_where": "只保存在这个浏览器里",
    "none_kept": "还没有",
    "nothing_open": "没有打开的对话",
    "deleted_elsewhere": "这个对话已在另一个标签页中删除，不再保存。",
    "untitled": "无标题",
    "rename": "重命名",
    "delete": "删除",
    "sure": "确定删除？",
    "yes": "是",
    "no": "否",
    "export_md": "导出为 Markdown",
    "export_json": "全部导出为 JSON",
    "import": "导入",
    "imported": "已导入 {count} 个",
    "not_ours": "{name} 不是本页面导出的文件：需要在这里导出的 .json 或 .md 文件",
    "store_full": "浏览器的存储空间已满，这个对话没有保存。请导出或删除一些。",
    "you": "你",
    "bot": "助手",
    "copy": "复制消息",
    "copy_all": "复制对话",
    "send": "发送",
    "stop": "停止",
    "menu": "对话与设置",
}

# Which words a browser gets, by the languages that Gradio knows.
BROWSER = {"en": EN, "zh-CN": ZH, "zh-TW": ZH}

# What the presets of the settings panel put into the system prompt.
PRESETS = {
    "assistant": {"en": "You are a helpful assistant.", "zh": "你是一个乐于助人的助手。"},
    "translator": {
        "en": "You are a translator. Translate Chinese into English and everything else into Chinese. Give the translation alone.",
        "zh": "你是一名翻译。把中文译成英文，把其他语言译成中文，只给出译文。",
    },
    "coder": {
        "en": "You are an experienced programmer. Answer with short, working code in a code block and a sentence on how it works.",
        "zh": "你是一名经验丰富的程序员。用代码块给出简短可用的代码，再用一句话说明原理。",
    },
    "teacher": {
        "en": "You are a patient teacher. Explain step by step in simple words, with an example, and end with a question to check.",
        "zh": "你是一位耐心的老师。用简单的话一步一步讲解，举一个例子，最后提一个问题检查是否听懂。",
    },
}


def preferred(setting: str, accept_language: str | None) -> "Words":
    """The words of the language in `setting`; where that is "auto", of the language the browser asks for first."""
    if setting == "auto":
        setting = "zh" if _first_language(accept_language or "").startswith("zh") else "en"
    return Words(ZH if setting == "zh" else EN)


def _first_language(accept_language: str) -> str:
    """The language that an Accept-Language header puts first: "en;q=0.5, zh-CN" -> "zh-cn"."""
    best, weight = "", 0.0
    for choice in accept_language.lower().split(","):
        name, _, quality = choice.partition(";q=")
        try:
            value = float(quality or 1)
        except ValueError:
            continue
        if name.strip() and value > weight:
            best, weight = name.strip(), value
    return best


def plain(table: dict) -> dict[str, str]:
    """The words of a language that need no choice between one and many: for the browser."""
    return {key: text for key, text in table.items() if isinstance(text, str)}


class Words:
    """The words of one language: `words("busy")`, `words("waiting", place=2)`."""

    def __init__(self, table: dict):
        self._table = table

    def __call__(self, key: str, **values) -> str:
        return self._table[key].format(**values)

    def counted(self, key: str, count: float, **values) -> str:
        """`words(key)` in its form for one or for several."""
        return self._table[key][count > 1].format(count=f"{count:g}", **values)

    def state(self, state) -> str:
        """What the engine is doing before it can answer: "Loading model 43%"."""
        text = self(state.phase, name=state.name)
        if state.fraction is not None:
            return f"{text} {state.fraction:.0%}"
        return f"{text} {state.done / 1e6:,.0f} MB" if state.done else f"{text}…"

    def about(self, version: str, model: str, profile: str | None) -> str:
        """The page's last line."""
        return self("and").join([self("about", version=version, model=model), *([self("profile", name=profile)] if profile else [])])

    def fallback(self, model: str, reason: str) -> str:
        """That a stand-in is in use, and why: `reason` is weights.Weights.fallback, whose usual sentence is translated."""
        hosts, reached, more = reason.partition(" cannot be reached")
        if reached:
            reason = self("unreached", hosts=hosts.replace(" and ", self("hosts_and"))) + more
        return self("fallback", model=model, reason=reason)

    def waiting(self, reply) -> str:
        """Why an answer has not begun; nothing when there is no more to say than that it is being thought about."""
        if place := reply.place:  # which may be another a moment later
            return self("waiting", place=place)
        if 0 < reply.read < reply.to_read:
            return self("reading", read=f"{reply.read:,}", total=f"{reply.to_read:,}")
        return ""

    def size(self, size) -> str:
        """How large the text in the box is, and what will become of it; nothing while it is small."""
        if size.fate == "fits" and size.tokens <= size.window // 4:
            return ""
        key = {"fits": "size", "condensed": "will_condense", "refused": "will_refuse"}[size.fate]
        return self(key, size=f"{size.tokens:,}", window=f"{size.window:,}", limit=f"{size.limit:,}", excess=f"{size.tokens - size.limit:,}")

    def out_of_view(self, prompt) -> str:
        """The label of the line below which the model sees the chat."""
        key = "noted" if prompt.note else "dropped"
        return self._table[key][prompt.dropped > 1].format(count=prompt.dropped) if prompt.dropped else ""

    def figures(self, stats, n_ctx: int, condensed=None) -> str:
        """The line under an answer."""
        parts = []
        if stats.first_token_ms:
            parts.append(self("first_token", time=_duration(stats.first_token_ms)))
        if stats.tokens_per_second:
            parts.append(self("speed", speed=rate(stats.tokens_per_second)))
        used = stats.prompt_tokens + stats.answer_tokens
        parts.append(self("window", used=f"{used:,}", size=f"{n_ctx:,}"))
        parts.append(self("reused", count=f"{stats.cached_tokens:,}"))
        if stats.finish_reason == "length":
            parts.append(self("cut_off", count=f"{stats.answer_tokens:,}"))
        if condensed:
            sizes = {"before": f"{condensed.before:,}", "after": f"{condensed.after:,}", "parts": condensed.parts}
            parts.append(self._table["condensed"][condensed.parts > 1].format(**sizes))
        return self("and").join(parts)

    def uptime(self, seconds: float) -> str:
        """For how long something has gone on: "3 h 12 min"."""
        minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
        form = self._table["view_time"][2 if days else 1 if hours else 0]
        return form.format(minutes=minutes % 60, hours=hours % 24, days=days)


def size(n_bytes: float) -> str:
    """A number of bytes in the units that disks are sold in: "491 MB", "4.0 GB"."""
    return f"{n_bytes / 1e6:,.0f}\u00a0MB" if n_bytes < 1e9 else f"{n_bytes / 1e9:,.1f}\u00a0GB"


def rate(per_second: float) -> str:
    """A number of tokens or words a second."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"


def seconds(duration: float) -> str:
    """A number of seconds, to a hundredth where that tells something."""
    return f"{duration:.2f}" if duration < 10 else f"{duration:,.0f}"


def _duration(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
