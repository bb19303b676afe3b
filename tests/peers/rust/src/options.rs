//! The command line: `--name value`.

/// Returns the value of an option.
pub fn option(name: &str, default: &str) -> String {
    let flag = format!("--{name}");
    let mut told = std::env::args().skip_while(|word| *word != flag);
    told.nth(1).unwrap_or_else(|| default.into())
}
