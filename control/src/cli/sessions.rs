//! `vipgate sessions` and `vipgate sessions flush`. The listing is streamed: a table of any size needs little memory.

use std::time::Duration;

use super::show::{block_on, connect};
use super::table::{Table, number, word};
use super::{Filter, Format, QueryArgs};
use crate::admin::Request;
use crate::admin::server::FlushReply;
use crate::admin::workers::Session;
use crate::command_error::CommandError;
use crate::output::{format_duration, json, print, put};

/// Default limit of a table.
const DEFAULT_LIMIT: u64 = 100;
/// Timeout of a flush, which scans the whole session table before it replies.
const FLUSH_TIMEOUT: Duration = Duration::from_mins(5);

/// Prints matching sessions, up to `limit`; 0: all; default: `DEFAULT_LIMIT` in a table, all in JSON.
pub(super) fn list(args: &QueryArgs, filter: &Filter, limit: Option<u64>) -> Result<(), CommandError> {
    let limit = match (limit, args.output) {
        (Some(0), _) | (None, Format::Json) => u64::MAX,
        (Some(limit), _) => limit,
        (None, Format::Table) => DEFAULT_LIMIT,
    };
    // One more than is shown, to detect truncation; 0: all.
    let requested = limit.checked_add(1).unwrap_or(0);
    let mut writer = SessionWriter::new(args.output);
    block_on(async {
        let mut client = connect(args).await?;
        client.send(&Request::Sessions { filter: filter.into(), limit: requested }).await?;
        let mut remaining = limit;
        let mut truncated = false;
        if !writer.begin()? {
            return Ok(());
        }
        loop {
            let chunk = match client.next::<Vec<Session>>().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return writer.end(truncated),
                Err(error) => {
                    // What has arrived is shown all the same.
                    writer.flush()?;
                    return Err(error.into());
                }
            };
            let take = usize::try_from(remaining).unwrap_or(usize::MAX).min(chunk.len());
            truncated |= take < chunk.len();
            remaining -= take as u64;
            if !writer.write(&chunk[..take])? {
                return Ok(());
            }
        }
    })
}

/// Ends matching sessions. All sessions only with `--all`, not with a forgotten filter.
pub(super) fn flush(args: &QueryArgs, filter: &Filter, all: bool) -> Result<(), CommandError> {
    let has_filter = *filter != Filter::default();
    if !has_filter && !all {
        return Err(CommandError::usage(
            "sessions flush: give a filter (--endpoint, --vip, --remote, --proto, --state), or --all for all sessions",
        ));
    }
    if has_filter && all {
        return Err(CommandError::usage("sessions flush: --all and a filter exclude each other"));
    }
    let request = Request::FlushSessions(filter.into());
    let reply: FlushReply = block_on(async { Ok(connect(args).await?.ask_within(FLUSH_TIMEOUT, &request).await?) })?;
    match args.output {
        Format::Json => json(&reply),
        Format::Table => print(&format!("{} sessions ended\n", reply.ended)),
    }
}

/// Rows that are aligned together: a worker may send one session at a time.
const ALIGNED_ROWS: usize = 256;

/// Writes a session listing to stdout. Its methods return false if the reader has closed the pipe.
enum SessionWriter {
    /// Aligned text.
    Table { table: Table, pending: usize, any: bool },
    /// `{"sessions": [..], "truncated": ..}`, one session per line.
    Json { any: bool },
}

impl SessionWriter {
    fn new(format: Format) -> Self {
        match format {
            Format::Table => {
                let columns = [
                    word("proto"),
                    word("direction"),
                    word("endpoint"),
                    word("vip"),
                    word("remote"),
                    word("state"),
                    number("idle"),
                    number("expires").optional(),
                    number("out").optional(),
                    number("in").optional(),
                    number("worker").optional(),
                ];
                Self::Table { table: Table::new(columns), pending: 0, any: false }
            }
            Format::Json => Self::Json { any: false },
        }
    }

    fn begin(&self) -> Result<bool, CommandError> {
        match self {
            Self::Table { .. } => Ok(true),
            Self::Json { .. } => put("{\"sessions\": ["),
        }
    }

    fn write(&mut self, sessions: &[Session]) -> Result<bool, CommandError> {
        if sessions.is_empty() {
            return Ok(true);
        }
        match self {
            Self::Table { table, pending, any } => {
                *any = true;
                for session in sessions {
                    table.row(row(session));
                }
                *pending += sessions.len();
                if *pending < ALIGNED_ROWS { Ok(true) } else { self.flush() }
            }
            Self::Json { any } => {
                let mut text = String::new();
                for session in sessions {
                    text.push_str(if *any { ",\n" } else { "\n" });
                    *any = true;
                    text.push_str(&serde_json::to_string(session).map_err(CommandError::runtime)?);
                }
                put(&text)
            }
        }
    }

    /// Writes the rows that wait to be aligned with others.
    fn flush(&mut self) -> Result<bool, CommandError> {
        match self {
            Self::Table { table, pending, .. } => {
                *pending = 0;
                put(&table.take())
            }
            Self::Json { .. } => Ok(true),
        }
    }

    fn end(&mut self, truncated: bool) -> Result<(), CommandError> {
        match self {
            Self::Table { any: false, .. } => print("no sessions match\n"),
            Self::Table { .. } => {
                self.flush()?;
                let more = if truncated { "... and more; --limit 0 shows all\n" } else { "" };
                print(more)
            }
            Self::Json { .. } => print(&format!("\n], \"truncated\": {truncated}}}\n")),
        }
    }
}

fn row(session: &Session) -> [String; 11] {
    [
        session.protocol.clone(),
        session.direction.clone(),
        session.endpoint.clone(),
        session.vip.clone(),
        session.remote.clone(),
        session.state.clone(),
        format_duration(session.idle_ms.into()),
        format_duration(session.expires_ms.into()),
        session.packets_out.to_string(),
        session.packets_in.to_string(),
        session.worker.to_string(),
    ]
}
