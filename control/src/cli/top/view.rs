//! Screen layout. What doesn't fit is cut off at the bottom and at the right; faults come first and in red.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table, Wrap};
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;

use super::sample::{Sample, ViewState};
use crate::admin::proto::Drop;
use crate::cli::{peers, show};
use crate::output::{format_duration, format_percent, permille, sanitize};

/// Minimum screen size, columns and lines.
const MIN_SIZE: (u16, u16) = (60, 16);
/// Minimum width of the drops box with its column of last packets.
const MIN_WIDTH_WITH_LAST: u16 = 80;
/// Lines of the upper boxes: titles and one line for each direction.
const UPPER_LINES: u16 = 10;

/// Draws the screen.
pub(super) fn draw(frame: &mut Frame<'_>, board: &ViewState) {
    let area = frame.area();
    if area.width < MIN_SIZE.0 || area.height < MIN_SIZE.1 {
        let text = format!(
            "vipgate top needs {} columns and {} lines; this terminal has {} and {}. Use `vipgate status`; q quits.",
            MIN_SIZE.0, MIN_SIZE.1, area.width, area.height
        );
        return frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
    }
    let Some(now) = &board.current else {
        let text = board.error.as_deref().unwrap_or("connecting ..");
        return frame.render_widget(Paragraph::new(sanitize(text)).wrap(Wrap { trim: true }), area);
    };
    let faults = faults(board, now);
    let fault_lines = u16::from(!faults.is_empty());
    let workers = u16::try_from(now.status.workers.len()).unwrap_or(u16::MAX).saturating_add(3).min(area.height / 4);
    let parts = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(fault_lines),
        Constraint::Length(UPPER_LINES.min(area.height / 2)),
        Constraint::Length(workers),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .split(area);
    frame.render_widget(head(now), parts[0]);
    frame.render_widget(Line::from(faults).style(Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)), parts[1]);
    let upper = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]).split(parts[2]);
    traffic(frame, upper[0], board);
    drops(frame, upper[1], board, now);
    frame.render_widget(workers_table(board, now), parts[3]);
    vips(frame, parts[4], board, now);
    let pause = if board.paused { "PAUSED  " } else { "" };
    let keys = Line::from(format!("{pause}q quits, p pauses, arrows scroll the VIPs")).style(Style::new().dim());
    frame.render_widget(keys, parts[5]);
}

fn head(now: &Sample) -> Paragraph<'static> {
    let status = &now.status;
    let policy = status.policy.clone().unwrap_or_default();
    let group = status.group.as_ref().map(|group| format!("  {}", peers::active_summary(group))).unwrap_or_default();
    let first = Line::from(vec![
        Span::from(sanitize(&status.name)).bold(),
        Span::from(format!("  up {}{}", format_duration(status.uptime_seconds * 1000), sanitize(&group))),
        Span::from(format!("  policy {}", sanitize(&policy.version))),
    ]);
    let second = format!(
        "{} VIPs, {} endpoints, {} Services; vipgate {}, pid {}",
        policy.vips, policy.endpoints, policy.services, status.version, status.pid
    );
    Paragraph::new(vec![first, Line::from(second)])
}

/// Faults, on one line.
fn faults(board: &ViewState, now: &Sample) -> String {
    let status = &now.status;
    let policy = status.policy.clone().unwrap_or_default();
    let mut texts = Vec::new();
    texts.extend(board.error.as_ref().map(|error| format!("NO REPLY: {error}")));
    texts.extend((!status.ready).then(|| "NOT READY".to_owned()));
    let down = status.interfaces.iter().filter(|interface| !interface.up);
    texts.extend(down.map(|interface| format!("{} is DOWN", interface.name)));
    let unhealthy = policy.manifests.as_ref().is_some_and(|manifests| !manifests.healthy);
    texts.extend(unhealthy.then(|| "manifests EMPTY or UNREADABLE: see `vipgate status`".to_owned()));
    texts.extend((!policy.last_error.is_empty()).then(|| "policy REJECTED: see `vipgate status`".to_owned()));
    texts.extend(policy.server.filter(|server| !server.connected).map(|_| "policy server NOT CONNECTED".to_owned()));
    if let Some(group) = &status.group {
        texts.extend((!group.serving).then(|| "NOT ACTIVE".to_owned()));
        texts.extend(group.draining.then(|| "DRAINING".to_owned()));
        texts.extend((group.lease == "expired").then(|| "LEASE EXPIRED".to_owned()));
    }
    let lost: u64 =
        now.drops.drops.iter().filter(|drop| is_ring_loss(drop)).filter_map(|it| board.drop_rate(&it.reason)).sum();
    texts.extend((lost > 0).then(|| format!("the rings LOSE {} packets/s", short(lost))));
    let claimed = now.vips.vips.iter().filter(|vip| vip.conflict.is_some());
    texts.extend(claimed.map(|vip| format!("{} is CLAIMED by another host", vip.address)));
    sanitize(&texts.join(", "))
}

fn frame_of(title: &str) -> Block<'_> {
    Block::new().borders(Borders::TOP).title(title)
}

fn traffic(frame: &mut Frame<'_>, area: Rect, board: &ViewState) {
    let rows = Direction::ALL.map(Direction::name).into_iter().map(|direction| {
        let (packets, bits) =
            board.direction_rates(direction).map_or(("-".to_owned(), "-".to_owned()), |(packets, bytes)| {
                (short(packets), short(bytes.saturating_mul(8)))
            });
        let style = if packets == "0" { Style::new().dim() } else { Style::new() };
        Row::new([Cell::from(direction), right(packets), right(bits)]).style(style)
    });
    let widths = [Constraint::Length(13), Constraint::Length(9), Constraint::Length(9)];
    let head = Row::new([Cell::from("direction"), right("packets/s".to_owned()), right("bit/s".to_owned())]).dim();
    let columns = Layout::horizontal([Constraint::Length(35), Constraint::Min(0)]).split(area);
    frame.render_widget(Table::new(rows, widths).header(head).block(frame_of("traffic ")), columns[0]);
    // Packet rate history, if the screen is wide enough.
    let block = frame_of("");
    let inner = block.inner(columns[1]);
    frame.render_widget(block, columns[1]);
    let shown = usize::from(inner.width.saturating_sub(1));
    let history: Vec<u64> = board.history.iter().rev().take(shown).rev().copied().collect();
    if shown >= 10 {
        frame.render_widget(Sparkline::default().data(&history).style(Style::new().fg(Color::Cyan)), inner);
    }
}

fn drops(frame: &mut Frame<'_>, area: Rect, board: &ViewState, now: &Sample) {
    let status = &now.status;
    let (opened, ended) = board.session_rates().map_or(("-".to_owned(), "-".to_owned()), |(a, b)| (short(a), short(b)));
    let used = permille(status.sessions + status.standby_sessions, status.session_capacity);
    let style = if used >= 900 { Style::new().fg(Color::Red) } else { Style::new() };
    // The standby count comes last: it is cut off first on a narrow screen.
    let standby = match status.standby_sessions {
        0 => String::new(),
        standby => format!(" with {} standby", short(standby)),
    };
    let parts = Layout::vertical([Constraint::Length(3), Constraint::Min(0)]).split(area);
    let lines = vec![
        Line::from(format!(
            "{} of {} ({}{standby})",
            status.sessions,
            short(status.session_capacity),
            format_percent(used)
        ))
        .style(style),
        Line::from(format!("{opened} opened/s, {ended} ended/s")),
    ];
    frame.render_widget(Paragraph::new(lines).block(frame_of("sessions ")), parts[0]);
    let mut reasons: Vec<(Option<u64>, &Drop)> = now
        .drops
        .drops
        .iter()
        .filter(|drop| drop.packets > 0)
        .map(|drop| (board.drop_rate(&drop.reason), drop))
        .collect();
    reasons.sort_by_key(|(rate, drop)| std::cmp::Reverse((*rate, drop.packets)));
    let rows = reasons.iter().map(|(rate, drop)| {
        let last = drop.last.as_ref().map(|last| format!("{} {} -> {}", last.protocol, last.source, last.destination));
        // Other reasons are intentional drops.
        let style = match *rate {
            None | Some(0) => Style::new(),
            _ if is_ring_loss(drop) => Style::new().fg(Color::Red),
            _ => Style::new().fg(Color::Yellow),
        };
        Row::new([
            Cell::from(drop.reason.clone()),
            right(rate.map_or("-".to_owned(), short)),
            right(short(drop.packets)),
            Cell::from(sanitize(&last.unwrap_or_default())),
        ])
        .style(style)
    });
    // A truncated packet summary is useless.
    let (last, last_width) =
        if area.width >= MIN_WIDTH_WITH_LAST { ("last", Constraint::Min(0)) } else { ("", Constraint::Length(0)) };
    let widths = [Constraint::Length(18), Constraint::Length(7), Constraint::Length(7), last_width];
    let head =
        Row::new([Cell::from("reason"), right("/s".to_owned()), right("total".to_owned()), Cell::from(last)]).dim();
    frame.render_widget(Table::new(rows, widths).header(head).block(frame_of("drops ")), parts[1]);
}

/// Whether the reason is packet loss at the rings, before a worker.
fn is_ring_loss(drop: &Drop) -> bool {
    [DropReason::RxNoBuffer, DropReason::RxRingFull, DropReason::RxTooLong]
        .iter()
        .any(|reason| reason.name() == drop.reason)
}

fn workers_table<'a>(board: &ViewState, now: &Sample) -> Table<'a> {
    let rate = |rate: Option<u64>| right(rate.map_or("-".to_owned(), short));
    let rows = now.status.workers.iter().map(|worker| {
        let number = worker.worker;
        Row::new([
            right(number.to_string()),
            right(worker.core.to_string()),
            right(short(worker.sessions)),
            rate(board.worker_rate(number, |it| it.received)),
            rate(board.worker_rate(number, |it| it.packets.values().sum())),
            rate(board.worker_rate(number, |it| it.drops)),
            rate(board.worker_rate(number, |it| it.handoffs)),
            right(worker.waiting.to_string()),
        ])
    });
    let widths = [6, 5, 9, 10, 11, 8, 10, 8].map(Constraint::Length);
    let titles = ["worker", "core", "sessions", "received/s", "forwarded/s", "drops/s", "handoffs/s", "waiting"];
    let head = Row::new(titles.map(|title| right(title.to_owned()))).dim();
    Table::new(rows.collect::<Vec<_>>(), widths).header(head).block(frame_of("workers "))
}

fn vips(frame: &mut Frame<'_>, area: Rect, board: &ViewState, now: &Sample) {
    let all = &now.vips.vips;
    // Title, header, and at least one row.
    let shown = usize::from(area.height.saturating_sub(2)).max(1);
    let first = board.scroll.min(all.len().saturating_sub(shown));
    let has_shards = all.iter().any(|vip| !vip.shares.is_empty());
    let rows = all.iter().skip(first).take(shown).map(|vip| {
        let owner = if has_shards { show::owners(&vip.shares) } else { String::new() };
        Row::new([
            Cell::from(vip.address.clone()),
            right(short(vip.sessions)),
            right(short(vip.endpoints)),
            Cell::from(sanitize(&vip.name)),
            Cell::from(sanitize(&owner)),
        ])
        .style(if vip.conflict.is_some() { Style::new().fg(Color::Red) } else { Style::new() })
    });
    let widths = [
        Constraint::Length(20),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Fill(2),
        Constraint::Fill(1),
    ];
    let owner = if has_shards { "owner" } else { "" };
    let head = Row::new([
        Cell::from("vip"),
        right("sessions".to_owned()),
        right("endpoints".to_owned()),
        Cell::from("name"),
        Cell::from(owner),
    ])
    .dim();
    let title = match all.len() {
        count if count > shown => {
            format!("VIPs {}-{} of {count}, by sessions ", first + 1, first + shown.min(count))
        }
        _ => "VIPs ".to_owned(),
    };
    frame.render_widget(Table::new(rows, widths).header(head).block(frame_of(&title)), area);
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Line::from(text).right_aligned())
}

/// Formats a number in at most five characters: `987`, `9876`, `98.7k`, `1.2M`.
fn short(number: u64) -> String {
    let of = |unit: u64, name: &str| {
        let tenths = number / (unit / 10);
        if tenths < 1000 { format!("{}.{}{name}", tenths / 10, tenths % 10) } else { format!("{}{name}", tenths / 10) }
    };
    match number {
        0..10_000 => number.to_string(),
        10_000..1_000_000 => of(1_000, "k"),
        1_000_000..1_000_000_000 => of(1_000_000, "M"),
        1_000_000_000..1_000_000_000_000 => of(1_000_000_000, "G"),
        _ => of(1_000_000_000_000, "T"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::admin::proto::{DropsReply, StatusReply, VipsReply};
    use crate::cli::top::screen_text;

    fn shown(columns: u16, lines: u16, board: &ViewState) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
        terminal.draw(|frame| draw(frame, board)).unwrap();
        screen_text(terminal.backend())
    }

    #[test]
    fn numbers_have_at_most_five_characters() {
        let expected = [
            (0, "0"),
            (9_999, "9999"),
            (10_000, "10.0k"),
            (99_999, "99.9k"),
            (999_999, "999k"),
            (1_500_000, "1.5M"),
            (2_345_678_901, "2.3G"),
            (7_000_000_000_000, "7.0T"),
        ];
        for (number, text) in expected {
            assert_eq!(short(number), text);
        }
    }

    #[test]
    fn ring_losses_are_red() {
        let sample = |ago, packets: [u64; 2]| Sample {
            at: Instant::now().checked_sub(Duration::from_secs(ago)).unwrap(),
            status: StatusReply { ready: true, ..StatusReply::default() },
            drops: DropsReply {
                drops: [DropReason::RxNoBuffer, DropReason::NoService]
                    .into_iter()
                    .zip(packets)
                    .map(|(reason, packets)| Drop { reason: reason.name().to_owned(), packets, ..Drop::default() })
                    .collect(),
                ..DropsReply::default()
            },
            vips: VipsReply::default(),
        };
        let color = |before, now, text: &str| {
            let board =
                ViewState { previous: Some(sample(2, before)), current: Some(sample(1, now)), ..ViewState::default() };
            let mut terminal = Terminal::new(TestBackend::new(100, 30)).unwrap();
            terminal.draw(|frame| draw(frame, &board)).unwrap();
            let buffer = terminal.backend().buffer();
            let lines: Vec<String> = screen_text(terminal.backend()).lines().map(str::to_owned).collect();
            let found =
                lines.iter().enumerate().find_map(|(y, line)| Some((line[..line.find(text)?].chars().count(), y)));
            found.map(|(x, y)| buffer[(x as u16, y as u16)].fg)
        };
        assert_eq!(color([0, 0], [70, 70], "rx_no_buffer"), Some(Color::Red));
        assert_eq!(color([0, 0], [70, 70], "no_service"), Some(Color::Yellow));
        assert_eq!(color([0, 0], [70, 70], "the rings LOSE 70 packets/s"), Some(Color::Red));
        // Earlier losses are no fault.
        assert_eq!(color([70, 0], [70, 0], "rx_no_buffer"), Some(Color::Reset));
        assert_eq!(color([70, 0], [70, 0], "LOSE"), None);
    }

    #[test]
    fn table_usage_fits_the_minimum_screen() {
        let of = |sessions, standby_sessions| {
            let status = StatusReply {
                ready: true,
                sessions,
                standby_sessions,
                session_capacity: 65_536,
                ..StatusReply::default()
            };
            let (drops, vips) = (DropsReply::default(), VipsReply::default());
            let now = Some(Sample { at: Instant::now(), status, drops, vips });
            shown(MIN_SIZE.0, MIN_SIZE.1, &ViewState { current: now, ..ViewState::default() })
        };
        assert!(of(41, 0).contains("41 of 65.5k (0.1 %)"));
        let full = of(61_600, 3_900);
        assert!(full.contains("61600 of 65.5k (100.0 % with"), "{full}");
    }

    #[test]
    fn every_screen_size_is_drawn() {
        let board = ViewState { error: Some("no gateway".to_owned()), ..ViewState::default() };
        for columns in [1, 2, 40, 59, 60, 80, 200] {
            for lines in [1, 2, 15, 16, 24, 50] {
                let text = shown(columns, lines, &board);
                assert_eq!(text.lines().count(), usize::from(lines));
            }
        }
        let text = shown(40, 10, &board).replace('\n', " ");
        assert!(text.contains("needs 60 columns and 16 lines"), "{text}");
        assert!(shown(80, 24, &board).starts_with("no gateway"));
    }
}
