//! Tables for people: aligned columns, two blanks between them, nothing drawn, so that `grep` and `awk` can read them,
//! too. On a terminal that is too narrow, optional columns are left out; elsewhere all are there.

use std::io::IsTerminal;

/// A column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    title: &'static str,
    number: bool,
    optional: bool,
}

/// A column of words, aligned to the left.
pub(super) fn word(title: &'static str) -> Column {
    Column { title, number: false, optional: false }
}

/// A column of numbers, aligned to the right.
pub(super) fn number(title: &'static str) -> Column {
    Column { title, number: true, optional: false }
}

impl Column {
    /// May be left out where there is no room.
    pub(super) fn optional(self) -> Self {
        Self { optional: true, ..self }
    }
}

/// A table, as far as it isn't printed yet. A long one is printed piece by piece: widths are those of the first piece,
/// and grow where a later one needs more.
#[derive(Debug)]
pub(super) struct Table {
    columns: Vec<Column>,
    /// Of each column, characters; `None` is left out.
    widths: Vec<Option<usize>>,
    rows: Vec<Vec<String>>,
    /// Columns of characters on a line; `None`: no limit.
    room: Option<usize>,
    begun: bool,
}

impl Table {
    /// A table for stdout.
    pub(super) fn new(columns: impl Into<Vec<Column>>) -> Self {
        Self::with_room(columns, room())
    }

    fn with_room(columns: impl Into<Vec<Column>>, room: Option<usize>) -> Self {
        let columns = columns.into();
        let widths = columns.iter().map(|column| Some(column.title.len())).collect();
        Self { columns, widths, rows: Vec::new(), room, begun: false }
    }

    /// Adds a row: a cell for each column.
    pub(super) fn row(&mut self, cells: impl Into<Vec<String>>) {
        let cells = cells.into();
        debug_assert_eq!(cells.len(), self.columns.len(), "a cell for each column");
        self.rows.push(cells);
    }

    /// Whether no row waits to be printed.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The text of the rows since the last time; the first time with titles.
    pub(super) fn take(&mut self) -> String {
        let rows = std::mem::take(&mut self.rows);
        for row in &rows {
            for (cell, width) in row.iter().zip(&mut self.widths) {
                *width = width.map(|width| width.max(cell.chars().count()));
            }
        }
        let mut text = String::new();
        if !self.begun {
            self.begun = true;
            self.leave_out();
            let titles: Vec<String> = self.columns.iter().map(|column| column.title.to_uppercase()).collect();
            self.line(&titles, &mut text);
        }
        for row in &rows {
            self.line(row, &mut text);
        }
        text
    }

    /// Leaves optional columns out, the last first, until a line fits or none is left.
    fn leave_out(&mut self) {
        let Some(room) = self.room else { return };
        for at in (0..self.columns.len()).rev() {
            let shown: Vec<usize> = self.widths.iter().flatten().copied().collect();
            if shown.iter().sum::<usize>() + 2 * shown.len().saturating_sub(1) <= room {
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
            let blanks = width.saturating_sub(cell.chars().count());
            let (before, after) = if column.number { (blanks, 0) } else { (0, blanks) };
            text.extend(std::iter::repeat_n(' ', before));
            text.push_str(cell);
            text.extend(std::iter::repeat_n(' ', after));
        }
        text.truncate(text.trim_end_matches(' ').len().max(begin));
        text.push('\n');
    }
}

/// Characters on a line of the terminal that stdout is; `None` when it is none.
fn room() -> Option<usize> {
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

    fn table(room: Option<usize>) -> Table {
        let columns = [word("name"), number("count"), word("note").optional(), number("more").optional()];
        let mut table = Table::with_room(columns, room);
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
    fn a_narrow_terminal_loses_optional_columns_from_the_last() {
        assert_eq!(table(Some(31)).take().lines().next(), Some("NAME    COUNT  NOTE        MORE"));
        assert_eq!(table(Some(30)).take().lines().next(), Some("NAME    COUNT  NOTE"));
        assert_eq!(table(Some(5)).take(), "NAME    COUNT\na           7\nlonger  12345\n", "the rest is kept whole");
    }

    #[test]
    fn a_later_piece_keeps_the_columns_and_has_no_titles() {
        let mut table = table(Some(30));
        table.take();
        table.row(["the longest".to_owned(), "1".to_owned(), String::new(), "2".to_owned()]);
        assert_eq!(table.take(), "the longest      1\n");
        assert!(table.is_empty());
    }

    #[test]
    fn an_empty_last_cell_leaves_no_blanks() {
        let mut table = Table::with_room([word("a"), word("b")], None);
        table.row(["x".to_owned(), String::new()]);
        table.row([String::new(), String::new()]);
        assert_eq!(table.take(), "A  B\nx\n\n");
    }
}
