//! Text tables: aligned columns separated by two spaces, without borders, so that `grep` and `awk` can process them.
//! Optional columns are omitted on a terminal that is too narrow for them.

use std::io::IsTerminal;

#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    title: &'static str,
    number: bool,
    optional: bool,
}

/// A left-aligned text column.
pub(super) fn word(title: &'static str) -> Column {
    Column { title, number: false, optional: false }
}

/// A right-aligned numeric column.
pub(super) fn number(title: &'static str) -> Column {
    Column { title, number: true, optional: false }
}

impl Column {
    /// Marks the column as omitted first when the terminal is too narrow.
    pub(super) fn optional(self) -> Self {
        Self { optional: true, ..self }
    }
}

/// A table, rendered in chunks: the first chunk sets the column widths, later ones may widen them.
#[derive(Debug)]
pub(super) struct Table {
    columns: Vec<Column>,
    /// Width of each column in characters; `None`: omitted.
    widths: Vec<Option<usize>>,
    rows: Vec<Vec<String>>,
    /// Limit of a line in characters; `None`: no limit.
    line_width: Option<usize>,
    has_titles: bool,
}

impl Table {
    /// A table for stdout.
    pub(super) fn new(columns: impl Into<Vec<Column>>) -> Self {
        Self::with_width(columns, terminal_width())
    }

    fn with_width(columns: impl Into<Vec<Column>>, line_width: Option<usize>) -> Self {
        let columns = columns.into();
        let widths = columns.iter().map(|column| Some(column.title.len())).collect();
        Self { columns, widths, rows: Vec::new(), line_width, has_titles: false }
    }

    /// Adds a row with a cell for each column.
    pub(super) fn row(&mut self, cells: impl Into<Vec<String>>) {
        let cells = cells.into();
        debug_assert_eq!(cells.len(), self.columns.len(), "a cell for each column");
        self.rows.push(cells);
    }

    /// Whether there are no rows to render.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Renders and removes the rows added since the last call; the first call adds the titles.
    pub(super) fn take(&mut self) -> String {
        let rows = std::mem::take(&mut self.rows);
        for row in &rows {
            for (cell, width) in row.iter().zip(&mut self.widths) {
                *width = width.map(|width| width.max(cell.chars().count()));
            }
        }
        let mut text = String::new();
        if !self.has_titles {
            self.has_titles = true;
            self.omit_optional();
            let titles: Vec<String> = self.columns.iter().map(|column| column.title.to_uppercase()).collect();
            self.line(&titles, &mut text);
        }
        for row in &rows {
            self.line(row, &mut text);
        }
        text
    }

    /// Omits optional columns, the last one first, until a line fits or none is left.
    fn omit_optional(&mut self) {
        let Some(line_width) = self.line_width else { return };
        for at in (0..self.columns.len()).rev() {
            let shown: Vec<usize> = self.widths.iter().flatten().copied().collect();
            if shown.iter().sum::<usize>() + 2 * shown.len().saturating_sub(1) <= line_width {
                return;
            }
            if self.columns[at].optional {
                self.widths[at] = None;
            }
        }
    }

    fn line(&self, cells: &[String], text: &mut String) {
        let begin = text.len();
        for ((cell, column), width) in cells.iter().zip(&self.columns).zip(&self.widths) {
            let Some(width) = width else { continue };
            if text.len() > begin {
                text.push_str("  ");
            }
            let padding = width.saturating_sub(cell.chars().count());
            let (before, after) = if column.number { (padding, 0) } else { (0, padding) };
            text.extend(std::iter::repeat_n(' ', before));
            text.push_str(cell);
            text.extend(std::iter::repeat_n(' ', after));
        }
        text.truncate(text.trim_end_matches(' ').len().max(begin));
        text.push('\n');
    }
}

/// Width of the terminal in characters; `None` if stdout is not a terminal.
fn terminal_width() -> Option<usize> {
    let stdout = std::io::stdout();
    if !stdout.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(stdout).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(line_width: Option<usize>) -> Table {
        let columns = [word("name"), number("count"), word("note").optional(), number("more").optional()];
        let mut table = Table::with_width(columns, line_width);
        for (name, count) in [("a", 7), ("longer", 12_345)] {
            table.row([name.to_owned(), count.to_string(), "some words".to_owned(), "1".to_owned()]);
        }
        table
    }

    #[test]
    fn columns_line_up() {
        let expected = "NAME    COUNT  NOTE        MORE\n\
                        a           7  some words     1\n\
                        longer  12345  some words     1\n";
        assert_eq!(table(None).take(), expected);
    }

    #[test]
    fn a_narrow_terminal_omits_optional_columns_from_the_last() {
        assert_eq!(table(Some(31)).take().lines().next(), Some("NAME    COUNT  NOTE        MORE"));
        assert_eq!(table(Some(30)).take().lines().next(), Some("NAME    COUNT  NOTE"));
        assert_eq!(
            table(Some(5)).take(),
            "NAME    COUNT\na           7\nlonger  12345\n",
            "other columns are never omitted"
        );
    }

    #[test]
    fn a_later_chunk_keeps_the_columns_and_has_no_titles() {
        let mut table = table(Some(30));
        table.take();
        table.row(["the longest".to_owned(), "1".to_owned(), String::new(), "2".to_owned()]);
        assert_eq!(table.take(), "the longest      1\n");
        assert!(table.is_empty());
    }

    #[test]
    fn an_empty_last_cell_leaves_no_trailing_spaces() {
        let mut table = Table::with_width([word("a"), word("b")], None);
        table.row(["x".to_owned(), String::new()]);
        table.row([String::new(), String::new()]);
        assert_eq!(table.take(), "A  B\nx\n\n");
    }
}
