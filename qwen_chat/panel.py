"""The settings panel: what one browser tab may set for itself. Its values go along with every message."""

import gradio as gr

from . import preferences, texts
from .config import Config

STEPS = {"temperature": 0.05, "top_p": 0.05, "repeat_penalty": 0.05, "max_tokens": 1, "max_turns": 1}
NARROWER = {"top_p": (0.05, None), "repeat_penalty": (0.8, 1.6), "max_turns": (None, 50)}  # than config.yaml: what a slider is good for


class Panel:
    """The components of the panel, in the order of `preferences.KEYS`; they are drawn by `render`."""

    def __init__(self, config: Config, word):
        self._config = config
        self._word = word
        self.defaults = preferences.defaults(config)
        self.inputs = [self._component(name, value) for name, value in self.defaults.items()]

    def config(self, values) -> Config:
        """The configuration that a tab's values make. Raises ConfigError."""
        return preferences.applied(self._config, dict(zip(preferences.KEYS, values)))

    def render(self) -> None:
        """Draws the panel, closed, where it is called."""
        with gr.Accordion(self._word("settings"), open=False, elem_id="settings"):
            with gr.Row(elem_id="presets"):
                self.presets = {name: gr.Button(self._word(f"preset_{name}"), size="sm") for name in texts.PRESETS}
            for component in self.inputs:
                component.render()
            self.reset = gr.Button(self._word("reset"), size="sm", elem_id="reset")

    def wire(self, page: gr.Blocks) -> None:
        """Everything here happens in the browser (page.js); the values are kept for as long as the tab is."""
        system_prompt = self.inputs[0]
        for name, button in self.presets.items():
            button.click(None, None, [system_prompt], js=f"() => chatPage.preset('{name}')")
        self.reset.click(None, None, self.inputs, js="chatPage.resetSettings")
        gr.on([component.change for component in self.inputs], None, self.inputs, None, js="chatPage.keepSettings")
        page.load(None, None, self.inputs, js="chatPage.restoreSettings")

    def _component(self, name: str, value):
        label, info = self._word(f"set_{name}"), self._word(f"info_{name}")
        if name == "system_prompt":
            return gr.Textbox(value, label=label, placeholder=info, lines=2, max_lines=6, max_length=4000, render=False)
        least, greatest = preferences.bounds(name)
        if name == "max_tokens":
            greatest = self._config.runtime.n_ctx // 2
        if name == "seed":
            return _unjudged(gr.Number(value, label=label, info=info, precision=0, render=False))
        low, high = NARROWER.get(name, (None, None))
        least = min(value, least if low is None else low)
        greatest = max(value, greatest if high is None else high)
        return _unjudged(gr.Slider(least, greatest, value, step=STEPS[name], label=label, info=info, buttons=[], render=False))


def _unjudged(component):
    """Bounds are for the hand; what a program sends is judged by `preferences`, in a sentence that names the setting."""
    component.preprocess = lambda payload: payload
    return component
