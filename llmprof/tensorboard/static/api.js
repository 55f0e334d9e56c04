// Asks our backend. Addresses are relative to this module, so that --path_prefix works.

export class ReportError extends Error {
  constructor(text, hint) {
    super(text);
    this.hint = hint;
  }
}

async function get(path) {
  let response;
  try {
    response = await fetch(new URL(path, import.meta.url));
  } catch {
    throw new ReportError("TensorBoard does not answer.", "Is it still running?");
  }
  let body = null;
  try {
    body = await response.json();
  } catch {
    throw new ReportError(
      `TensorBoard answered with status ${response.status} and no report.`,
      "Its terminal shows what went wrong.",
    );
  }
  if (body?.error) {
    throw new ReportError(String(body.error.message ?? "unknown error"), String(body.error.hint ?? ""));
  }
  return body;
}

export const fetchRuns = () => get("data/runs");
export const fetchReport = (run) => get(`data/report?run=${encodeURIComponent(run)}`);
