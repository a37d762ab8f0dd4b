// api: the gateway's read endpoints. The key stays in this tab (sessionStorage), and goes to this gateway only.

const KEY = "troupe.key";

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY) || "";
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** GET v1/admin/PARTS?PARAMS as JSON; ApiError with the gateway's own words, status 0 where it is not reached. */
export async function get(parts, params = {}, signal = undefined) {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  const url = `v1/admin/${parts.map(encodeURIComponent).join("/")}${query.size ? `?${query}` : ""}`;
  const key = storedKey();
  let answer;
  try {
    answer = await fetch(url, { headers: key ? { Authorization: `Bearer ${key}` } : {}, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The gateway does not answer. It is asked again as soon as it is back.", "unreachable");
  }
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    const said = body.error || {};
    throw new ApiError(answer.status, said.message || `HTTP ${answer.status}`, said.code || "");
  }
  return body;
}
