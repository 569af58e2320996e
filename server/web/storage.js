// The browser's storage. A browser that blocks the data of sites refuses any access to it; values
// are then kept in memory.

function storageOf(find) {
  const memory = new Map();
  const attempt = (use, otherwise) => {
    try {
      return use(find());
    } catch {
      return otherwise();
    }
  };
  return {
    // Returns null if there is no such value.
    get: (name) => attempt((store) => store.getItem(name), () => memory.get(name) ?? null),
    set: (name, value) => attempt((store) => store.setItem(name, value),
      () => memory.set(name, value)),
    remove: (name) => attempt((store) => store.removeItem(name), () => memory.delete(name)),
  };
}

export const ofSession = storageOf(() => sessionStorage);
export const ofBrowser = storageOf(() => localStorage);
