//! Tables of text.

/// Lays out rows of cells in columns, two spaces apart. Columns of numbers are right-aligned.
pub(super) fn table<const N: usize>(head: [&str; N], is_number: [bool; N], rows: &[[String; N]]) -> String {
    let cell_width = |row: &[String; N], column: usize| row[column].chars().count();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| cell_width(row, column));
        cells.chain([head[column].len()]).max().unwrap_or_default()
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |cells: &[String; N]| {
        let cells = cells.iter().enumerate().map(|(column, cell)| {
            let width = widths[column];
            if is_number[column] { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    let mut text = line(&head.map(str::to_owned));
    text.extend(rows.iter().map(line));
    text
}

/// Formats a time in milliseconds, in seconds or in hours, depending on its size.
pub(super) fn duration(us: u64) -> String {
    match us {
        0..1_000_000 => format!("{:.1} ms", us as f64 / 1e3),
        1_000_000..100_000_000 => format!("{:.2} s", us as f64 / 1e6),
        _ => {
            let seconds = us / 1_000_000;
            format!("{}h {:02}m {:02}s", seconds / 3600, seconds / 60 % 60, seconds % 60)
        }
    }
}

#[cfg(test)]
mod tests;
