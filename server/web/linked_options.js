// The options of a view that its address holds: their values as texts, "" for the initial value.

const fire = (node) => {
  for (const type of ["input", "change"]) node.dispatchEvent(new Event(type, { bubbles: true }));
};

function linkSelect(select) {
  return {
    get: () => select.dataset.wanted ?? (select.selectedIndex > 0 ? select.value : ""),
    set(value) {
      delete select.dataset.wanted;
      const at = value === "" ? 0 : [...select.options].findIndex((one) => one.value === value);
      if (at >= 0) select.selectedIndex = Math.min(at, select.options.length - 1);
      // The options can be unknown until the server has answered; see setOptions().
      else if (select.options.length === 0) select.dataset.wanted = value;
      fire(select);
    },
  };
}

function linkCheckbox(input) {
  return {
    get: () => (input.checked === input.defaultChecked ? "" : input.checked ? "1" : "0"),
    set(value) {
      input.checked = value === "1" || (value !== "0" && input.defaultChecked);
      fire(input);
    },
  };
}

function linkText(field) {
  const initial = field.defaultValue;
  return {
    get: () => (field.value === initial ? "" : field.value || " "),
    set(value) {
      field.value = value === "" ? initial
        : field.maxLength > 0 ? value.slice(0, field.maxLength) : value;
      if (!field.checkValidity()) field.value = initial;
      fire(field);
    },
  };
}

// `name`: the name of a group of radio buttons.
export function linkRadios(name) {
  const inputs = [...document.getElementsByName(name)];
  const initial = inputs.find((input) => input.defaultChecked);
  return {
    get() {
      const chosen = inputs.find((input) => input.checked);
      // The button for the value "" needs a text of its own.
      return chosen === initial ? "" : chosen.value || "all";
    },
    set(value) {
      const chosen = inputs.find((input) => (input.value || "all") === value) ?? initial;
      chosen.checked = true;
      fire(chosen);
    },
  };
}

const link = (control) => {
  if (!(control instanceof Element)) return control;
  if (control instanceof HTMLSelectElement) return linkSelect(control);
  return control.type === "checkbox" ? linkCheckbox(control) : linkText(control);
};

export class LinkedOptions {
  // `controls`: by name, a form control or an object with get() and set(text). `relevant(name)`
  // returns whether the option matters now.
  constructor(controls, relevant = () => true) {
    this.controls = Object.entries(controls).map(([name, control]) => [name, link(control)]);
    this.relevant = relevant;
  }

  // Returns [name, value] of the options that differ from their initial values.
  changed() {
    return this.controls.filter(([name]) => this.relevant(name))
      .map(([name, { get }]) => [name, get()]).filter(([, value]) => value !== "");
  }

  // Sets all options, those that `params` lacks to their initial values. Ignores what is not valid.
  restore(params) {
    for (const [name, { get, set }] of this.controls) {
      const value = params.get(name) ?? "";
      if (value !== get()) set(value);
    }
  }
}
