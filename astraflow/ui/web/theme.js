// Before the first paint: the theme that was chosen last; else the system's.
try {
  const chosen = localStorage.getItem("astraflow-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing shows the system's theme.
}
