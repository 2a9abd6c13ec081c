"""Every word that the page shows, in Chinese and in English, and how its figures are written."""

EN = {
    "lang": "en",
    "hello": "What would you like to know?",
    "placeholder": "Message",
    "about": "qwen-chat {version} · {model} · llama.cpp",
    "profile": "profile {name}",
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
    "and": " · ",
}
ZH = {
    "lang": "zh-CN",
    "hello": "想聊点什么？",
    "placeholder": "输入消息",
    "about": "qwen-chat {version} · {model} · llama.cpp",
    "profile": "设备配置 {name}",
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

    def state(self, state) -> str:
        """What the engine is doing before it can answer: "Loading model 43%"."""
        text = self(state.phase, name=state.name)
        if state.fraction is not None:
            return f"{text} {state.fraction:.0%}"
        return f"{text} {state.done / 1e6:,.0f} MB" if state.done else f"{text}…"

    def about(self, version: str, model: str, profile: str | None) -> str:
        """The page's last line."""
        return self("and").join([self("about", version=version, model=model), *([self("profile", name=profile)] if profile else [])])

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
            parts.append(self("speed", speed=_rate(stats.tokens_per_second)))
        used = stats.prompt_tokens + stats.answer_tokens
        parts.append(self("window", used=f"{used:,}", size=f"{n_ctx:,}"))
        parts.append(self("reused", count=f"{stats.cached_tokens:,}"))
        if stats.finish_reason == "length":
            parts.append(self("cut_off", count=f"{stats.answer_tokens:,}"))
        if dropped:
            parts.append(self._table["dropped"][dropped > 1].format(count=dropped))
        return self("and").join(parts)


def _duration(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"
