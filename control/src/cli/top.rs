//! `vipgate top`: live view of a gateway, built from the requests of other commands.

mod sample;
mod view;

use std::io::IsTerminal;
use std::thread;
use std::time::Duration;

use clap::Args;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use self::sample::{Sample, ViewState};
use self::view::draw;
use super::show::block_on;
use crate::admin::{Client, ClientError};
use crate::command_error::CommandError;
use crate::config::units::parse_duration;
use crate::output;

/// Arguments of `vipgate top`.
#[derive(Clone, Debug, Args)]
pub(super) struct Top {
    /// Admin socket of the gateway
    #[arg(long, value_name = "PATH", default_value = "/run/vipgate/gateway.sock")]
    socket: std::path::PathBuf,
    /// Update interval
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    every: Duration,
    /// Take two samples, print one screen as text, and exit; size: the terminal's, or COLUMNSxLINES
    #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "", value_parser = size)]
    once: Option<Size>,
}

/// Columns and lines; `None`: the terminal's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size(Option<(u16, u16)>);

/// An argument that isn't a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("expected COLUMNSxLINES, such as 80x24")]
struct SizeError;

fn size(text: &str) -> Result<Size, SizeError> {
    if text.is_empty() {
        return Ok(Size(None));
    }
    let parts = text.split_once('x').and_then(|(columns, lines)| Some((columns.parse().ok()?, lines.parse().ok()?)));
    let fits = |size: &(u16, u16)| (1..=1000).contains(&size.0) && (1..=1000).contains(&size.1);
    parts.filter(fits).map(|size| Size(Some(size))).ok_or(SizeError)
}

/// Lower limit of the update interval.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

pub(super) fn run(args: &Top) -> Result<(), CommandError> {
    let every = args.every.max(MIN_INTERVAL);
    match args.once {
        Some(size) => once(args, size, every),
        None if std::io::stdout().is_terminal() && std::io::stdin().is_terminal() => live(args, every),
        None => Err(CommandError::usage(
            "top needs a terminal; in scripts, use `vipgate top --once`, `vipgate status -o json` or /metrics",
        )),
    }
}

/// Prints one screen as text.
fn once(args: &Top, size: Size, every: Duration) -> Result<(), CommandError> {
    let board = block_on(async {
        let mut board = ViewState::default();
        board.add(take_sample(args).await?);
        tokio::time::sleep(every).await;
        board.add(take_sample(args).await?);
        Ok(board)
    })?;
    let terminal = || ratatui::crossterm::terminal::size().ok().filter(|_| std::io::stdout().is_terminal());
    let (columns, lines) = size.0.or_else(terminal).unwrap_or((80, 24));
    let mut terminal = Terminal::new(TestBackend::new(columns, lines)).map_err(CommandError::runtime)?;
    terminal.draw(|frame| draw(frame, &board)).map_err(CommandError::runtime)?;
    output::print(&screen_text(terminal.backend()))
}

/// The cells of a screen as lines of text.
fn screen_text(backend: &TestBackend) -> String {
    let buffer = backend.buffer();
    let line = |y| (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    let lines: Vec<String> = (0..buffer.area.height).map(|y| format!("{}\n", line(y).trim_end())).collect();
    lines.concat()
}

/// User input.
enum Input {
    Quit,
    Pause,
    Up,
    Down,
    /// The terminal was resized.
    Redraw,
}

/// Runs the live view until the user quits.
fn live(args: &Top, every: Duration) -> Result<(), CommandError> {
    // Reports a failed connection before the alternate screen is entered.
    block_on(async { Ok(Client::connect(&args.socket).await?) })?;
    let mut terminal =
        ratatui::try_init().map_err(|error| CommandError::runtime(error).context("cannot draw on this terminal"))?;
    let outcome = block_on(follow(args, every, &mut terminal));
    ratatui::restore();
    outcome
}

async fn follow(args: &Top, every: Duration, terminal: &mut ratatui::DefaultTerminal) -> Result<(), CommandError> {
    let mut inputs = inputs();
    let mut board = ViewState::default();
    let mut next = Instant::now();
    loop {
        terminal.draw(|frame| draw(frame, &board)).map_err(CommandError::runtime)?;
        tokio::select! {
            () = sleep_until(next), if !board.paused => {
                match take_sample(args).await {
                    Ok(sample) => board.add(sample),
                    // The gateway may be restarting.
                    Err(error) => board.error = Some(error.to_string()),
                }
                next = Instant::now() + every;
            }
            input = inputs.recv() => match input {
                None | Some(Input::Quit) => return Ok(()),
                Some(Input::Pause) => board.paused = !board.paused,
                Some(Input::Up) => board.scroll = board.scroll.saturating_sub(1),
                Some(Input::Down) => board.scroll = board.scroll.saturating_add(1),
                Some(Input::Redraw) => {}
            }
        }
    }
}

async fn take_sample(args: &Top) -> Result<Sample, ClientError> {
    let mut client = Client::connect(&args.socket).await?;
    Sample::take(&mut client).await
}

/// Keyboard input, from a thread that ends with the process: reading a terminal blocks.
fn inputs() -> mpsc::UnboundedReceiver<Input> {
    let (sender, receiver) = mpsc::unbounded_channel();
    thread::spawn(move || {
        while let Ok(event) = event::read() {
            let input = match event {
                Event::Key(key) if key.kind == KeyEventKind::Press => key_input(key),
                Event::Resize(..) => Some(Input::Redraw),
                _ => None,
            };
            if let Some(input) = input
                && sender.send(input).is_err()
            {
                return;
            }
        }
    });
    receiver
}

fn key_input(key: KeyEvent) -> Option<Input> {
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Some(Input::Quit),
        KeyCode::Char('q') | KeyCode::Esc => Some(Input::Quit),
        KeyCode::Char('p' | ' ') => Some(Input::Pause),
        KeyCode::Up | KeyCode::Char('k') => Some(Input::Up),
        KeyCode::Down | KeyCode::Char('j') => Some(Input::Down),
        _ => None,
    }
}
