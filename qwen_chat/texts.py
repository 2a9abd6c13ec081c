"""Every word that the page shows, in Chinese and in English, and how its figures are written."""

EN = {
    "lang": "en",
    "hello": "What would you like to know?",
    "placeholder": "Message",
    "chat_tab": "Chat",
    "view_tab": "Performance",
    "about": "qwen-chat {version} · {model} · llama.cpp",
    "looking": "Looking for the model",
    "downloading": "Downloading {name}",
    "checking": "Checking {name}",
    "loading": "Loading model",
    "closed": "The server is shutting down",
    "fallback": "This is a stand-in: {model}. {reason}",
    "waiting": "Waiting: {place} in line",
    "reading": "Reading your message: {read} of {total} tokens",
    "busy": "Too many people are waiting for an answer right now. Please try again in a moment.",
    "too_long": "This message is too long: {size} tokens, and the limit is {limit}. Please shorten it.",
    "failed": "No answer: {reason}",
    "broken": "Something went wrong while answering. Please try again; the server's log says more.",
    "empty": "The model had nothing to say. Please try again.",
    "first_token": "first token {time}",
    "speed": "{speed} tokens/s",
    "window": "window {used} / {size} tokens",
    "reused": "{count} reused",
    "cut_off": "stopped at the limit of {count} tokens",
    "dropped": ("the first round is no longer in view", "the first {count} rounds are no longer in view"),
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
    "view_params": "Parameters",
    "view_millions": "{count} million",
    "view_window": "Window",
    "view_tokens": "{count} tokens",
    "view_threads": "Threads",
    "view_threads_of": "{threads} (usable cores: {cores})",
    "view_code": "Computes with",
    "view_uptime": "Running for",
    "view_time": ("{minutes} min", "{hours} h {minutes} min", "{days} d {hours} h"),
    "and": " · ",
}
ZH = {
    "lang": "zh-CN",
    "hello": "想聊点什么？",
    "placeholder": "输入消息",
    "chat_tab": "对话",
    "view_tab": "性能",
    "about": "qwen-chat {version} · {model} · llama.cpp",
    "looking": "正在寻找模型",
    "downloading": "正在下载 {name}",
    "checking": "正在校验 {name}",
    "loading": "正在加载模型",
    "closed": "服务正在关闭",
    "fallback": "当前使用的是备用模型：{model}。{reason}",
    "waiting": "排队中：第 {place} 位",
    "reading": "正在阅读你的消息：{read} / {total} 个词元",
    "busy": "现在等待回答的人太多了，请稍后再试。",
    "too_long": "这条消息太长了：共 {size} 个词元，上限是 {limit} 个。请缩短后再发。",
    "failed": "无法回答：{reason}",
    "broken": "回答时出错了，请重试；详情见服务器日志。",
    "empty": "模型没有给出回答，请重试。",
    "first_token": "首字 {time}",
    "speed": "{speed} 词元/秒",
    "window": "窗口 {used} / {size} 词元",
    "reused": "复用 {count}",
    "cut_off": "已到 {count} 个词元的上限",
    "dropped": ("最早的 1 轮对话已不在视野内", "最早的 {count} 轮对话已不在视野内"),
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
    "view_params": "参数量",
    "view_millions": "{count}M",
    "view_window": "窗口",
    "view_tokens": "{count} 词元",
    "view_threads": "线程",
    "view_threads_of": "{threads} 个（可用 {cores} 核）",
    "view_code": "指令集",
    "view_uptime": "已运行",
    "view_time": ("{minutes} 分钟", "{hours} 小时 {minutes} 分钟", "{days} 天 {hours} 小时"),
    "and": " · ",
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

    def waiting(self, reply) -> str:
        """Why an answer has not begun; nothing when there is no more to say than that it is being thought about."""
        if reply.place:
            return self("waiting", place=reply.place)
        if 0 < reply.read < reply.to_read:
            return self("reading", read=f"{reply.read:,}", total=f"{reply.to_read:,}")
        return ""

    def figures(self, stats, n_ctx: int, dropped: int = 0) -> str:
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
        if dropped:
            parts.append(self.counted("dropped", dropped))
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
