//! Charts as SVG: axes with units, lines with markers, a legend. Colors follow the reader's light or dark scheme.

use std::fmt::Write as _;

use super::axis::Axis;

/// Size of the image, and the margins around the plot area: left, right (with the legend), top, bottom.
const SIZE: [f64; 2] = [880.0, 440.0];
const MARGINS: [f64; 4] = [72.0, 262.0, 66.0, 58.0];
/// Characters of a legend line.
const LEGEND_WIDTH: usize = 29;

/// Styles of both schemes. The colors of series differ in lightness, too, and so do their markers and dashes.
const STYLE: &str = "\
text { font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; font-size: 13px; fill: #24292f; }
.title { font-size: 16px; font-weight: 600; }
.note { font-size: 12px; fill: #57606a; }
.page { fill: #ffffff; }
.grid { stroke: #d8dee4; stroke-width: 1; }
.axis { stroke: #57606a; stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.thin { stroke-width: 1.5; }
.s0 { stroke: #0969da; } .m0 { fill: #0969da; }
.s1 { stroke: #bc4c00; } .m1 { fill: #bc4c00; }
.s2 { stroke: #1a7f37; } .m2 { fill: #1a7f37; }
.s3 { stroke: #8250df; } .m3 { fill: #8250df; }
.s4 { stroke: #bf3989; } .m4 { fill: #bf3989; }
.s5 { stroke: #6e7781; } .m5 { fill: #6e7781; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.note { fill: #9198a1; }
.page { fill: #0d1117; }
.grid { stroke: #30363d; }
.axis { stroke: #9198a1; }
.s0 { stroke: #58a6ff; } .m0 { fill: #58a6ff; }
.s1 { stroke: #f0883e; } .m1 { fill: #f0883e; }
.s2 { stroke: #56d364; } .m2 { fill: #56d364; }
.s3 { stroke: #bc8cff; } .m3 { fill: #bc8cff; }
.s4 { stroke: #ff7bba; } .m4 { fill: #ff7bba; }
.s5 { stroke: #8b949e; } .m5 { fill: #8b949e; }
}
";
/// Colors of measured series; the last one is that of lines for comparison.
const COLORS: usize = 5;

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drawing {
    /// Measured points, connected.
    Measured,
    /// A value that lasts until the next point.
    Steps,
    /// A line for comparison, dashed and without markers.
    Comparison,
}

/// A series of points.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) label: String,
    pub(super) drawing: Drawing,
    pub(super) points: Vec<[f64; 2]>,
}

#[derive(Clone, Debug)]
pub(super) struct Chart {
    pub(super) title: String,
    /// One line about the measurement, below the title.
    pub(super) note: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
}

impl Chart {
    /// The chart as an SVG document.
    pub(super) fn to_svg(&self) -> String {
        let [width, height] = SIZE;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\">\n<title>{}</title>\n<style>\n{STYLE}</style>\n\
             <rect class=\"page\" width=\"{width}\" height=\"{height}\" rx=\"6\"/>\n",
            escape(&self.title)
        );
        self.draw_frame(&mut svg);
        let mut color = 0;
        let mut legend_y = MARGINS[2] + 8.0;
        for series in &self.series {
            let number = if series.drawing == Drawing::Comparison { COLORS } else { color };
            if series.drawing != Drawing::Comparison {
                color = (color + 1) % COLORS;
            }
            self.draw_series(&mut svg, series, number);
            legend_y = draw_legend(&mut svg, series, number, legend_y);
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// Title, grid, axes and their labels.
    fn draw_frame(&self, svg: &mut String) {
        let [left, _, top, _] = MARGINS;
        let [right, bottom] = place([1.0, 0.0]);
        text(svg, "title", [left, 28.0], "start", &self.title);
        text(svg, "note", [left, 48.0], "start", &self.note);
        for (value, label) in &self.y.ticks {
            let y = place([0.0, self.y.position(*value)])[1];
            line(svg, "grid", [left, y], [right, y]);
            text(svg, "note", [left - 8.0, y + 4.0], "end", label);
        }
        for (value, label) in &self.x.ticks {
            let x = place([self.x.position(*value), 0.0])[0];
            line(svg, "grid", [x, top], [x, bottom]);
            text(svg, "note", [x, bottom + 18.0], "middle", label);
        }
        line(svg, "axis", [left, bottom], [right, bottom]);
        line(svg, "axis", [left, top], [left, bottom]);
        text(svg, "", [f64::midpoint(left, right), SIZE[1] - 16.0], "middle", &self.x.label);
        let (x, y) = (20.0, f64::midpoint(top, bottom));
        let _ = writeln!(
            svg,
            "<text transform=\"translate({x} {y}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escape(&self.y.label)
        );
    }

    fn draw_series(&self, svg: &mut String, series: &Series, color: usize) {
        let positions = series.points.iter().map(|&[x, y]| [self.x.position(x), self.y.position(y)]);
        let places: Vec<[f64; 2]> = positions.map(place).collect();
        let (class, dash) = match series.drawing {
            Drawing::Comparison => ("line thin", " stroke-dasharray=\"6 4\""),
            Drawing::Measured | Drawing::Steps => ("line", ""),
        };
        let path = path_of(&places, series.drawing);
        let _ = writeln!(svg, "<path class=\"{class} s{color}\" d=\"{path}\"{dash}/>");
        if series.drawing == Drawing::Measured {
            for (&place, [x, y]) in places.iter().zip(&series.points) {
                marker(svg, color, place, Some(&format!("{}: {x}, {y}", series.label)));
            }
        }
    }
}

/// Place in the image of a position between 0 and 1 on both axes.
fn place([x, y]: [f64; 2]) -> [f64; 2] {
    let [left, right, top, bottom] = MARGINS;
    let [width, height] = [SIZE[0] - left - right, SIZE[1] - top - bottom];
    [left + width * x, top + height * (1.0 - y)]
}

/// The path through places; a coordinate has a tenth of a pixel.
fn path_of(places: &[[f64; 2]], drawing: Drawing) -> String {
    let mut path = String::new();
    for (at, [x, y]) in places.iter().enumerate() {
        match (at, drawing) {
            (0, _) => {
                let _ = write!(path, "M{x:.1} {y:.1}");
            }
            (_, Drawing::Steps) => {
                let _ = write!(path, "H{x:.1}V{y:.1}");
            }
            (_, Drawing::Measured | Drawing::Comparison) => {
                let _ = write!(path, "L{x:.1} {y:.1}");
            }
        }
    }
    path
}

/// A marker whose shape depends on the series, with its value as a tooltip; that in the legend has none.
fn marker(svg: &mut String, series: usize, [x, y]: [f64; 2], tooltip: Option<&str>) {
    let class = if tooltip.is_some() { format!("m{series}") } else { format!("key m{series}") };
    let shape = match series % 3 {
        0 => format!("circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\""),
        1 => format!("rect class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\" width=\"7\" height=\"7\"", x - 3.5, y - 3.5),
        _ => {
            let [top, bottom, left, right] = [y - 5.0, y + 3.5, x - 4.5, x + 4.5];
            format!("polygon class=\"{class}\" points=\"{x:.1},{top:.1} {right:.1},{bottom:.1} {left:.1},{bottom:.1}\"")
        }
    };
    let end = ["circle", "rect", "polygon"][series % 3];
    let _ = match tooltip {
        Some(tooltip) => writeln!(svg, "<{shape}><title>{}</title></{end}>", escape(tooltip)),
        None => writeln!(svg, "<{shape}/>"),
    };
}

/// A series' entry in the legend; returns where the next one starts.
fn draw_legend(svg: &mut String, series: &Series, color: usize, y: f64) -> f64 {
    let x = SIZE[0] - MARGINS[1] + 18.0;
    let dash = if series.drawing == Drawing::Comparison { " stroke-dasharray=\"6 4\"" } else { "" };
    let _ = writeln!(svg, "<path class=\"line s{color}\" d=\"M{x:.1} {y:.1}H{:.1}\"{dash}/>", x + 22.0);
    if series.drawing == Drawing::Measured {
        marker(svg, color, [x + 11.0, y], None);
    }
    let lines = wrap(&series.label, LEGEND_WIDTH);
    for (at, words) in lines.iter().enumerate() {
        text(svg, "note", [x + 30.0, y + 4.0 + 15.0 * at as f64], "start", words);
    }
    y + 15.0 * lines.len() as f64 + 9.0
}

/// Lines of at most `width` characters, split between words.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

fn line(svg: &mut String, class: &str, from: [f64; 2], to: [f64; 2]) {
    let ([x1, y1], [x2, y2]) = (from, to);
    let _ = writeln!(svg, "<path class=\"{class}\" d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\"/>");
}

fn text(svg: &mut String, class: &str, [x, y]: [f64; 2], anchor: &str, content: &str) {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    let _ = writeln!(svg, "<text{class} x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escape(content));
}

/// Text as XML character data.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
