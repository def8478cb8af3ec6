//! The wall clock of one process, which jumps: libfaketime shows it another one. The machine's own clock isn't touched, since others live
//! by it, and a namespace for `CLOCK_REALTIME` doesn't exist. Monotonic time stays as it is, as where a clock is set.

use std::fs;
use std::path::{Path, PathBuf};

const LIBRARY: &str = "faketime/libfaketime.so.1";

/// Where the library is, if it is installed and wanted (`SOAK_CLOCK=0`: not).
pub(crate) fn library() -> Option<PathBuf> {
    let folder = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let path = Path::new(&folder).join(LIBRARY);
    let is_wanted = std::env::var("SOAK_CLOCK").as_deref() != Ok("0");
    (is_wanted && path.exists()).then_some(path)
}

/// The command that a process is started by for its clock to be as far off as a file says.
pub(crate) fn wrapper(library: &Path, file: &Path) -> Vec<String> {
    fs::write(file, "+0").unwrap();
    let variables = [
        format!("LD_PRELOAD={}", library.display()),
        format!("FAKETIME_TIMESTAMP_FILE={}", file.display()),
        // It reads the file again after a second.
        "FAKETIME_CACHE_DURATION=1".into(),
        "FAKETIME_DONT_FAKE_MONOTONIC=1".into(),
        "DONT_FAKE_MONOTONIC=1".into(),
        // Files have the times that they have.
        "NO_FAKE_STAT=1".into(),
    ];
    [vec!["env".to_owned()], variables.into()].concat()
}

/// Sets a clock so many seconds from the right time.
pub(crate) fn set(file: &Path, seconds: i64) {
    let draft = file.with_extension("draft");
    fs::write(&draft, format!("{seconds:+}")).unwrap();
    fs::rename(draft, file).unwrap();
}
