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

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** GET v1/admin/PARTS?PARAMS as JSON; throws ApiError with the gateway's message; status 0 means that it was not reached. */
export async function get(parts, params = {}, signal = undefined) {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  const url = `v1/admin/${parts.map(encodeURIComponent).join("/")}${query.size ? `?${query}` : ""}`;
  const key = storedKey();
  let response;
  try {
    response = await fetch(url, { headers: key ? { Authorization: `Bearer ${key}` } : {}, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The gateway does not respond. The page retries until it does.", "unreachable");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) {
    const error = body.error || {};
    throw new ApiError(response.status, error.message || `HTTP ${response.status}`, error.code || "");
  }
  return body;
}
