//! Tasks, and who owns them: a group that is stopped and waited for ([`Tasks`]), or the handle of a single one ([`Task`]).
//!
//! A panic surfaces where a task is waited for. That is in tests: in the product a panic ends the process.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A group of tasks with one end: a stop signal, a deadline, and the names of those that are late. Clones are the same
/// group. Dropping it stops nothing.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    signal: CancellationToken,
    tracker: TaskTracker,
    registry: Arc<Mutex<Registry>>,
}

/// The tasks of a group that haven't ended.
#[derive(Debug, Default)]
struct Registry {
    next: u64,
    running: BTreeMap<u64, Running>,
    /// The first one that has panicked.
    panicked: Option<&'static str>,
}

#[derive(Debug)]
struct Running {
    name: &'static str,
    /// `None` until it is spawned.
    handle: Option<AbortHandle>,
}

impl Tasks {
    /// A group that stops with this one, or alone. The caller waits for its tasks.
    pub fn child(&self) -> Self {
        Self { signal: self.signal.child_token(), ..Self::default() }
    }

    /// Spawns a task, which ends by itself after the stop signal.
    pub fn spawn<T: Send + 'static>(
        &self,
        name: &'static str,
        future: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.spawn_on(name, future, &Handle::current())
    }

    /// Spawns a task on another runtime.
    pub fn spawn_on<T: Send + 'static>(
        &self,
        name: &'static str,
        future: impl Future<Output = T> + Send + 'static,
        runtime: &Handle,
    ) -> JoinHandle<T> {
        let entry = Entry::new(&self.registry, name);
        let number = entry.number;
        let task = async move {
            let _entry = entry;
            future.await
        };
        // Not under the lock: a runtime that ends drops the task here.
        let handle = self.tracker.spawn_on(task, runtime);
        if let Some(running) = lock(&self.registry).running.get_mut(&number) {
            running.handle = Some(handle.abort_handle());
        }
        handle
    }

    /// Spawns a task that the stop signal ends wherever it waits.
    pub fn spawn_until_stopped<T: Send + 'static>(
        &self,
        name: &'static str,
        future: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<Option<T>> {
        self.spawn(name, self.signal.clone().run_until_cancelled_owned(future))
    }

    /// Whether the stop signal was given.
    pub fn is_stopping(&self) -> bool {
        self.signal.is_cancelled()
    }

    /// Waits for the stop signal. Cancel-safe.
    pub async fn stopped(&self) {
        self.signal.cancelled().await;
    }

    /// Gives the stop signal and waits until all tasks have ended; those that are late are named in the log and aborted.
    /// Returns whether none was late. Not for the group's own tasks, which would wait for themselves.
    pub async fn stop(&self, deadline: Duration) -> bool {
        self.signal.cancel();
        self.tracker.close();
        let in_time = timeout(deadline, self.tracker.wait()).await.is_ok();
        if !in_time {
            self.abort();
        }
        let panicked = lock(&self.registry).panicked;
        if let Some(name) = panicked {
            resume_unwind(Box::new(format!("the task `{name}` has panicked")));
        }
        in_time
    }

    fn abort(&self) {
        let late = std::mem::take(&mut lock(&self.registry).running);
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for Running { name, handle } in late.into_values() {
            *counts.entry(name).or_default() += 1;
            if let Some(handle) = handle {
                handle.abort();
            }
        }
        let names: Vec<String> = counts.iter().map(|(name, count)| format!("{name} ({count})")).collect();
        tracing::info!(event = "tasks_late", tasks = names.join(", "), "aborted: they have not ended in time");
    }
}

/// The entry of a running task, which removes it.
struct Entry {
    registry: Arc<Mutex<Registry>>,
    number: u64,
}

impl Entry {
    fn new(registry: &Arc<Mutex<Registry>>, name: &'static str) -> Self {
        let mut tasks = lock(registry);
        let number = tasks.next;
        tasks.next += 1;
        tasks.running.insert(number, Running { name, handle: None });
        Self { registry: registry.clone(), number }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut tasks = lock(&self.registry);
        let ended = tasks.running.remove(&self.number);
        if let Some(Running { name, .. }) = ended.filter(|_| std::thread::panicking()) {
            tasks.panicked.get_or_insert(name);
        }
    }
}

fn lock(registry: &Mutex<Registry>) -> MutexGuard<'_, Registry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A task that ends when this is dropped. Awaiting it returns its output. Cancel-safe.
#[derive(Debug)]
#[must_use = "dropping it aborts the task"]
pub struct Task<T = ()>(Option<JoinHandle<T>>);

impl<T: Send + 'static> Task<T> {
    pub fn spawn(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self::spawn_on(future, &Handle::current())
    }

    /// Spawns a task on another runtime.
    pub fn spawn_on(future: impl Future<Output = T> + Send + 'static, runtime: &Handle) -> Self {
        Self(Some(runtime.spawn(future)))
    }
}

impl<T> Task<T> {
    pub fn is_finished(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        if let Some(handle) = &self.0 {
            handle.abort();
        }
    }
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        poll_output(&mut self.0, context)
    }
}

/// Work on a blocking thread, which goes on when this is dropped. Awaiting it returns its output. Cancel-safe.
#[derive(Debug)]
pub struct Blocking<T>(Option<JoinHandle<T>>);

/// Starts work on a blocking thread of the current runtime.
pub fn spawn_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Blocking<T> {
    Blocking(Some(tokio::task::spawn_blocking(work)))
}

impl<T> Future for Blocking<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        poll_output(&mut self.0, context)
    }
}

/// Polls for the output; a panic is resumed.
fn poll_output<T>(slot: &mut Option<JoinHandle<T>>, context: &mut Context<'_>) -> Poll<T> {
    let Some(handle) = slot else { return Poll::Pending };
    let Poll::Ready(ended) = Pin::new(handle).poll(context) else { return Poll::Pending };
    *slot = None;
    match ended.map_err(tokio::task::JoinError::try_into_panic) {
        Ok(output) => Poll::Ready(output),
        Err(Ok(panic)) => resume_unwind(panic),
        // Cancelled without an output: its runtime ends, and the waiting task with it.
        Err(Err(_)) => Poll::Pending,
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::mpsc;

    use super::*;

    const NEVER: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(20);

    /// The message of a panic in this future.
    async fn panic_of(future: impl Future<Output: Send + 'static> + Send + 'static) -> Option<String> {
        let panic = tokio::spawn(future).await.err()?.into_panic();
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| panic.downcast_ref::<String>().cloned())
    }

    /// Sends when it is dropped.
    struct Dropped(mpsc::Sender<()>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    async fn is_dropped(dropped: mpsc::Receiver<()>) -> bool {
        spawn_blocking(move || dropped.recv_timeout(NEVER).is_ok()).await
    }

    #[tokio::test]
    async fn a_stop_ends_a_group_and_its_children_but_not_its_parent() {
        let parent = Tasks::default();
        let (group, other) = (parent.child(), parent.child());
        let child = group.child();
        let tasks = [&group, &child].map(|tasks| {
            let signal = tasks.clone();
            tasks.spawn("waits", async move { signal.stopped().await })
        });
        let cut = group.spawn_until_stopped("cut", pending::<()>());
        let output = group.spawn_until_stopped("output", async { 7 });
        assert_eq!(output.await.unwrap(), Some(7));
        assert!(group.stop(NEVER).await && child.stop(NEVER).await);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(cut.await.unwrap(), None);
        assert!(group.is_stopping() && child.is_stopping() && !parent.is_stopping() && !other.is_stopping());
        parent.stop(NEVER).await;
        assert!(other.is_stopping() && parent.child().is_stopping());
    }

    #[tokio::test]
    async fn a_stop_waits_for_what_tasks_still_do_until_the_deadline_and_aborts_those_that_are_late() {
        let tasks = Tasks::default();
        let signal = tasks.clone();
        let ends = tasks.spawn("ends", async move {
            signal.stopped().await;
            // Also what is spawned meanwhile.
            signal.spawn("last", tokio::time::sleep(SHORT));
            7
        });
        assert!(tasks.stop(NEVER).await);
        assert!(ends.is_finished());
        assert_eq!(ends.await.unwrap(), 7);
        assert!(lock(&tasks.registry).running.is_empty());

        let (sender, dropped) = mpsc::channel();
        let held = Dropped(sender);
        let late = tasks.spawn("late", async move {
            let _held = held;
            pending::<()>().await;
        });
        assert_eq!(lock(&tasks.registry).running.values().map(|task| task.name).collect::<Vec<_>>(), ["late"]);
        assert!(!tasks.stop(SHORT).await);
        assert!(late.await.unwrap_err().is_cancelled());
        assert!(is_dropped(dropped).await);
        assert!(tasks.stop(NEVER).await, "it isn't late twice");
    }

    #[tokio::test]
    async fn a_panic_is_resumed_at_the_waiting_task() {
        let tasks = Tasks::default();
        let task: JoinHandle<()> = tasks.spawn("compiler", async { panic!("a fault") });
        let _others = tasks.spawn_until_stopped("other", pending::<()>());
        assert!(panic_of(async { task.await.unwrap() }).await.is_some());
        let stop = async move { tasks.stop(NEVER).await };
        assert_eq!(panic_of(stop).await.unwrap(), "the task `compiler` has panicked");
        let task: Task = Task::spawn(async { panic!("of a task") });
        assert_eq!(panic_of(task).await.unwrap(), "of a task");
        let work: Blocking<()> = spawn_blocking(|| panic!("of work"));
        assert_eq!(panic_of(work).await.unwrap(), "of work");
        assert_eq!((Task::spawn(async { 7 }).await, spawn_blocking(|| 8).await), (7, 8));
    }

    #[tokio::test]
    async fn a_task_ends_when_its_handle_is_dropped_and_blocking_work_does_not() {
        let (sender, dropped) = mpsc::channel();
        let held = Dropped(sender);
        let task = Task::spawn(async move {
            let _held = held;
            pending::<()>().await;
        });
        tokio::task::yield_now().await;
        assert!(!task.is_finished());
        drop(task);
        assert!(is_dropped(dropped).await);
        let (sender, done) = mpsc::channel();
        drop(spawn_blocking(move || sender.send(7)));
        assert_eq!(spawn_blocking(move || done.recv_timeout(NEVER)).await, Ok(7));
    }

    #[test]
    fn tasks_of_a_runtime_that_has_ended_are_not_waited_for() {
        let tasks = Tasks::default();
        let other = tokio::runtime::Runtime::new().unwrap();
        let handle = other.handle().clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let running = tasks.spawn_on("waits", pending::<()>(), &handle);
        other.shutdown_background();
        let refused = tasks.spawn_on("refused", pending::<()>(), &handle);
        runtime.block_on(async {
            assert!(tasks.stop(NEVER).await);
            assert!(running.await.unwrap_err().is_cancelled() && refused.await.unwrap_err().is_cancelled());
            // There is no output, and no panic for that.
            assert!(timeout(SHORT, Task::spawn_on(async { 7 }, &handle)).await.is_err());
        });
    }
}
