"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("script");
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const data = read("data");
  const labels = read("labels");
  const drawn = new Map(); // name of a chart -> function that draws it again

  // ---- formatting, as in trainatomy.units ----
  const KIB = 1024, MIB = KIB ** 2, GIB = KIB ** 3, TIB = KIB ** 4;
  function bytes(count) {
    const size = Math.abs(count), sign = count < 0 ? "-" : "";
    if (size < KIB) return `${sign}${size} B`;
    if (size < MIB) return `${sign}${(size / KIB).toFixed(1)} KiB`;
    if (size < 1000 * MIB) return `${sign}${(size / MIB).toFixed(size < 10 * MIB ? 1 : 0)} MiB`;
    const [unit, name] = size < 1000 * GIB ? [GIB, "GiB"] : [TIB, "TiB"];
    return `${sign}${(size / unit).toFixed(size < 10 * unit ? 2 : 1)} ${name}`;
  }
  function seconds(time) {
    if (time === 0) return "0";
    if (time < 0.0009995) return `${(time * 1e6).toFixed(0)} µs`;
    if (time < 0.9995) return `${(time * 1e3).toFixed(time < 0.00995 ? 1 : 0)} ms`;
    return time < 100 ? `${time.toFixed(1)} s` : `${(time / 60).toFixed(1)} min`;
  }
  function amount(number) {
    for (const [size, name] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (number >= size) return `${(number / size).toPrecision(3)} ${name}`;
    return `${Number(number.toPrecision(3))}`;
  }
  const rate = (number) => number.toLocaleString("en", { maximumSignificantDigits: 3 });
  const units = {
    bytes, seconds, rate,
    share: (share) => `${(100 * share).toFixed(1)} %`,
    flop: (number) => `${amount(number)}FLOP`,
    flop_rate: (number) => `${amount(number)}FLOP/s`,
    "": amount,
  };
  // Ticks of an axis of bytes at powers of two, as ECharts only knows powers of ten.
  function byteTicks(most) {
    const step = 2 ** Math.ceil(Math.log2(Math.max(most, 8) / 6));
    return { interval: step, max: Math.ceil((most * 1.001) / step) * step };
  }
  const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  const folded = (path) => path.replace(/(?<=\.)\d+(?=\.|$)/g, "*");
  // Paths of modules may break after a dot or an underscore.
  const breakable = (text) => text.split(/(?<=[._])(?=[A-Za-z*])/).flatMap((part, place) => (place ? [document.createElement("wbr"), part] : [part]));

  // ---- theme ----
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const isNarrow = (box) => box.clientWidth < 560;
  function common() {
    return {
      animation: false,
      textStyle: { fontFamily: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", color: css("--ink") },
      tooltip: {
        confine: true, backgroundColor: css("--card"), borderColor: css("--line"), padding: [8, 10],
        textStyle: { color: css("--ink") }, extraCssText: "box-shadow:0 4px 14px rgb(0 0 0 / 18%);", className: "tip",
      },
      legend: {
        type: "scroll", top: 0, left: 0, itemWidth: 12, itemHeight: 12, itemGap: 14, icon: "roundRect",
        textStyle: { color: css("--muted"), fontSize: 12 }, pageIconColor: css("--accent"), pageTextStyle: { color: css("--muted") },
      },
    };
  }
  const axisStyle = () => ({
    axisLine: { lineStyle: { color: css("--line") } }, axisTick: { show: false },
    axisLabel: { color: css("--muted"), fontSize: 12, hideOverlap: true }, splitLine: { lineStyle: { color: css("--line"), opacity: 0.7 } },
    nameTextStyle: { color: css("--muted"), fontSize: 12 },
  });
  const limitLine = () => ({ type: "dashed", color: css("--bad"), width: 1.5 });

  // ---- charts ----
  function stack(box, spec) {
    const format = units[spec.unit];
    const totals = spec.rows.map((_, row) => spec.series.reduce((sum, one) => spec.stacked ? sum + (one.values[row] || 0) : Math.max(sum, one.values[row] || 0), 0));
    const most = Math.max(...totals, ...spec.marks.flatMap((each) => each.values.map((value) => value || 0)));
    const limits = spec.limits.filter((limit) => limit.value <= 4 * most);
    const end = Math.max(most, ...limits.map((limit) => limit.value));
    const one = spec.rows.length === 1 && !spec.rows[0];
    const base = common();
    const chart = start(box);
    const withLegend = !one && spec.series.length + spec.marks.length > 1;
    chart.setOption({
      ...base,
      legend: { ...base.legend, show: withLegend },
      grid: { left: one ? 4 : 8, right: 24, top: withLegend ? 44 : 26, bottom: spec.axis ? 26 : 8, containLabel: true },
      tooltip: {
        ...base.tooltip, trigger: "axis", axisPointer: { type: "shadow", shadowStyle: { opacity: 0.06 } },
        formatter: (rows) => {
          const parts = rows.filter((row) => row.value).map((row) => `<div class="row"><span>${row.marker}${escape(row.seriesName)}</span><b>${format(row.value)}</b></div>`);
          const total = spec.stacked && spec.series.length > 1 && !spec.marks.length ? `<div class="row part"><span></span><b>${format(totals[rows[0].dataIndex])}</b></div>` : "";
          return `<b>${escape(rows[0].name)}</b>${parts.join("")}${total}`;
        },
      },
      xAxis: {
        ...axisStyle(), type: "value", ...(spec.unit === "bytes" ? byteTicks(end) : {}),
        axisLabel: { ...axisStyle().axisLabel, formatter: format },
        name: spec.axis, nameLocation: "middle", nameGap: 28,
      },
      yAxis: {
        ...axisStyle(), type: "category", inverse: true, data: spec.rows,
        axisLabel: { ...axisStyle().axisLabel, color: css("--ink"), show: !one, width: isNarrow(box) ? 130 : 260, overflow: "break", lineHeight: 14, fontSize: isNarrow(box) ? 11 : 12 },
      },
      series: [...spec.series.map((each, place) => ({
        name: each.name, type: "bar", stack: spec.stacked ? "all" : undefined, data: each.values, barMaxWidth: 30,
        itemStyle: { color: each.colour, borderColor: css("--card"), borderWidth: spec.stacked ? 1 : 0 },
        emphasis: { disabled: true },
        ...(place === 0 && limits.length ? {
          markLine: {
            symbol: "none", silent: true, lineStyle: limitLine(),
            label: { color: css("--bad"), formatter: (mark) => mark.name, position: "start", rotate: 0, fontSize: 12 },
            data: limits.map((limit) => ({ name: `${limit.name}: ${format(limit.value)}`, xAxis: limit.value, label: { align: limit.value > 0.6 * end ? "right" : "center" } })),
          },
        } : {}),
      })), ...spec.marks.map((each) => ({
        name: each.name, type: "scatter", symbol: "diamond", symbolSize: 12, data: each.values, z: 5,
        itemStyle: { color: css("--ink"), borderColor: css("--card"), borderWidth: 1 },
      }))],
    });
    return chart;
  }

  function treemap(box, spec) {
    const base = common();
    const palette = ["#3d6fa5", "#4d8c42", "#7c5aa6", "#2a827d", "#b85f45", "#96701f", "#a04f80", "#5d6d7e"];
    const total = spec.nodes.reduce((sum, node) => sum + node.value, 0);
    // Colours distinguish the first level that no single module fills.
    const tinted = (node, tint) => ({ ...node, itemStyle: { color: tint }, children: node.children && node.children.map((child) => tinted(child, tint)) });
    const colour = (nodes) => {
      const sum = nodes.reduce((all, node) => all + node.value, 0);
      const most = nodes.find((node) => node.children && node.value > 0.85 * sum);
      return nodes.map((node, index) => (node === most ? { ...node, itemStyle: { color: "#5d6d7e" }, children: colour(node.children) } : tinted(node, palette[(index + (most ? 3 : 0)) % palette.length])));
    };
    const chart = start(box);
    const nodes = spec.nodes.length === 1 && spec.nodes[0].children ? spec.nodes[0].children : spec.nodes;
    const upper = { show: true, height: 24, color: "#fff", fontSize: 12, formatter: (node) => `${node.name}  ${bytes(node.value)}` };
    chart.setOption({
      ...base,
      legend: { show: false },
      tooltip: {
        ...base.tooltip,
        formatter: (node) => node.data && node.data.path !== undefined
          ? `<b>${escape(node.data.path)}</b><div class="row"><span>${bytes(node.value)}</span><span>${((100 * node.value) / total).toFixed(1)} %</span></div>${node.data.tensors ? `${node.data.tensors.toLocaleString("en")} tensors` : ""}`
          : "",
      },
      series: [{
        type: "treemap", name: spec.nodes.length === 1 ? spec.nodes[0].name : labels.module, data: colour(nodes), left: 0, right: 0, top: 4, bottom: 34, roam: false, nodeClick: "zoomToNode",
        breadcrumb: { bottom: 0, height: 24, itemStyle: { color: css("--faint"), borderColor: css("--line"), textStyle: { color: css("--ink") } }, emphasis: { itemStyle: { color: css("--line") } } },
        label: { color: "#fff", fontSize: 12, lineHeight: 16, overflow: "truncate", formatter: (node) => `${node.name}\n${bytes(node.value)}` },
        upperLabel: upper, itemStyle: { borderColor: css("--card"), borderWidth: 1, gapWidth: 1 },
        levels: [
          { itemStyle: { borderWidth: 0, gapWidth: 3 }, upperLabel: { show: false } },
          ...[0, 1, 2, 3, 4, 5].map((depth) => ({ itemStyle: { borderWidth: 2, gapWidth: 2, borderColorSaturation: 0.4 + 0.05 * depth }, upperLabel: upper })),
        ],
      }],
    });
    return chart;
  }

  function scatter(box, spec) {
    const base = common();
    const axis = (one, values) => ({
      ...axisStyle(), type: one.log ? "log" : "value", name: one.title, nameLocation: "middle", nameGap: 32,
      ...(one.unit === "bytes" ? byteTicks(Math.max(...values)) : one.log ? { min: 10 ** Math.floor(Math.log10(Math.min(...values))) } : { min: 0 }),
      axisLabel: { ...axisStyle().axisLabel, formatter: units[one.unit] },
    });
    const points = [...spec.series.flatMap((one) => one.points.map((point) => [point.x, point.y])), ...spec.lines.flatMap((one) => one.points)];
    const dashes = ["solid", "dashed", "dotted"];
    const chart = start(box);
    chart.setOption({
      ...base,
      grid: { left: 20, right: 24, top: 72, bottom: 36, containLabel: true },
      tooltip: {
        ...base.tooltip, trigger: "item",
        formatter: (point) => point.data.name === undefined ? escape(point.seriesName)
          : `<b>${escape(point.data.name)}</b><br>${(point.data.text || []).map(escape).join("<br>")}`,
      },
      xAxis: axis(spec.x, points.map((point) => point[0])),
      yAxis: { ...axis(spec.y, points.map((point) => point[1])), nameLocation: "end", nameGap: 14, nameTextStyle: { ...axisStyle().nameTextStyle, align: "left" } },
      series: [
        ...spec.lines.map((line, place) => ({
          name: line.name, type: "line", data: line.points, symbol: "none", silent: true, z: 1,
          lineStyle: { color: line.colour || css("--muted"), width: 1.5, type: line.colour ? "dashed" : dashes[place % 3] }, itemStyle: { color: line.colour || css("--muted") },
        })),
        ...spec.series.map((one) => ({
          name: one.name, type: "scatter", z: 2,
          itemStyle: { color: one.colour, opacity: 0.85, borderColor: css("--card"), borderWidth: 1 },
          data: one.points.map((point) => ({ value: [point.x, point.y], symbolSize: point.size || 9, name: point.label, text: point.text })),
        })),
      ],
    });
    return chart;
  }

  // ---- the timeline ----
  async function unpack(name) {
    const text = document.getElementById(`packed-${name}`).textContent.trim();
    const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  // Bytes by component after each event, from the allocations.
  function history(raw) {
    const events = raw.events, count = raw.born.length, kinds = raw.components.length;
    const born = new Int32Array(count), died = new Int32Array(count), component = new Uint8Array(count);
    const held = raw.components.map(() => new Float64Array(events));
    for (let i = 0, at = 0; i < count; i++) {
      at += raw.born[i];
      born[i] = at;
      died[i] = raw.life[i] ? at + raw.life[i] : events;
      component[i] = raw.sources[raw.source[i]][0];
      held[component[i]][at] += raw.bytes[i];
      if (died[i] < events) held[component[i]][died[i]] -= raw.bytes[i];
    }
    const total = new Float64Array(events);
    for (let kind = 0; kind < kinds; kind++) {
      const one = held[kind];
      for (let event = 0, sum = 0; event < events; event++) { sum += one[event]; one[event] = sum; total[event] += sum; }
    }
    return { events, count, born, died, component, held, total };
  }

  // The events that stand for [from, to]: all of them, or the highest of each stretch.
  function chosen(total, from, to, most) {
    const found = [];
    if (to - from < most) { for (let event = from; event <= to; event++) found.push(event); return found; }
    const width = (to - from + 1) / most;
    for (let place = 0; place < most; place++) {
      let best = from + Math.floor(place * width);
      const end = Math.min(to, from + Math.floor((place + 1) * width) - 1);
      for (let event = best + 1; event <= end; event++) if (total[event] > total[best]) best = event;
      found.push(best);
    }
    if (found[0] !== from) found.unshift(from);
    if (found[found.length - 1] !== to) found.push(to);
    return found;
  }

  async function timeline(box, spec) {
    const raw = await unpack(box.dataset.chart);
    const past = history(raw);
    const last = past.events - 1;
    const chart = start(box, "canvas");
    const table = box.closest("figure").nextElementSibling.querySelector("table");
    let view = [0, last], cursor = spec.peak, shown = [], every = false, mouse = null, resting = 0, refreshed = 0;
    const top = Math.max(...raw.reserved.map((each) => each[1]), past.total[spec.peak]);
    const bandAt = (event) => { let found = raw.bands[0]; for (const band of raw.bands) if (band[0] <= event) found = band; return found; };
    const where = (event) => { const band = bandAt(event); return band ? [band[1], band[2]].filter(Boolean).join(", ") : ""; };

    const reserved = raw.reserved.length ? [...raw.reserved, [last, raw.reserved[raw.reserved.length - 1][1]]] : [];
    function bands() {
      const plot = box.clientWidth - 90, span = view[1] - view[0] || 1;
      return raw.bands.map((band, place) => {
        const end = place + 1 < raw.bands.length ? raw.bands[place + 1][0] : last;
        const pixels = ((Math.min(end, view[1]) - Math.max(band[0], view[0])) / span) * plot;
        const text = [band[1], band[2]].filter(Boolean).join("\n");
        const longest = Math.max(band[1].length, band[2].length) * 6.4;
        return [
          { xAxis: band[0], name: text, itemStyle: { color: place % 2 ? css("--ink") : "transparent", opacity: 0.045 }, label: { show: pixels > longest } },
          { xAxis: end },
        ];
      });
    }
    function areas() {
      // Three pixels for each point; with a margin, so that a small move needs no new data.
      const margin = Math.round((view[1] - view[0]) / 8);
      const from = Math.max(0, view[0] - margin), to = Math.min(last, view[1] + margin);
      const most = Math.max(150, Math.min(400, Math.floor(box.clientWidth / 3)));
      shown = chosen(past.total, from, to, most);
      every = shown.length === to - from + 1;
      return past.held.map((held) => {
        const points = new Float64Array(2 * shown.length);
        let holds = false;
        for (let place = 0; place < shown.length; place++) {
          points[2 * place] = shown[place];
          points[2 * place + 1] = held[shown[place]];
          holds ||= held[shown[place]] > 0;
        }
        return holds ? points : []; // a component without memory here needs no area
      });
    }
    const step = () => (every ? "end" : false);
    function marks() {
      return { symbol: "none", silent: true, animation: false, data: [{ xAxis: cursor }], lineStyle: { color: css("--ink"), type: "solid", width: 1 }, label: { show: false } };
    }
    function series() {
      const drawing = areas();
      return [
        ...raw.components.map((each, kind) => ({
          id: `c${kind}`, name: each.title, type: "line", stack: "held", step: step(), symbol: "none", showSymbol: false, data: drawing[kind],
          lineStyle: { width: 0 }, areaStyle: { color: each.colour, opacity: 0.92 }, itemStyle: { color: each.colour }, emphasis: { disabled: true }, silent: true,
        })),
        {
          id: "reserved", name: labels.reserved_line, type: "line", step: "end", symbol: "none", data: reserved, silent: true, z: 5,
          lineStyle: { color: css("--muted"), width: 1.2, type: "dashed" }, itemStyle: { color: css("--muted") }, emphasis: { disabled: true },
          markArea: { silent: true, data: bands(), label: { position: "insideTop", color: css("--muted"), fontSize: 11, lineHeight: 14 } }, markLine: marks(),
        },
      ];
    }
    // The allocation that is drawn at a height: components from below, within each the oldest first.
    function at(event, height) {
      let below = 0, kind = 0;
      while (kind < raw.components.length && below + past.held[kind][event] <= height) below += past.held[kind++][event];
      if (kind === raw.components.length) return null;
      for (let i = 0; i < past.count && past.born[i] <= event; i++) {
        if (past.component[i] !== kind || past.died[i] <= event) continue;
        below += raw.bytes[i];
        if (below > height) return i;
      }
      return null;
    }
    const kinds = raw.sources.map(([kind, line, operation, module, phase, step]) => [kind, line, operation, folded(raw.texts[module]), phase, step].join(" "));
    function about(i) {
      const [kind, line, operation, module, phase, step] = raw.sources[raw.source[i]];
      const title = raw.components[kind].title, text = raw.texts[line];
      return {
        holds: text === title ? title : `${title}: ${text}`, colour: raw.components[kind].colour, operation: raw.texts[operation],
        module: raw.texts[module] || "–", made: step < 0 ? raw.texts[phase] : `step ${step + 1}, ${raw.texts[phase]}`, bytes: raw.bytes[i],
      };
    }
    function tip() {
      if (!mouse) return "";
      const { event, height } = mouse;
      const rows = raw.components.map((each, kind) => [each, past.held[kind][event]]).filter((row) => row[1] > 0).reverse();
      const swatch = (colour) => `<span class="swatch" style="--tint:${colour}"></span>`;
      const parts = rows.map(([each, size]) => `<div class="row"><span>${swatch(each.colour)}${escape(each.title)}</span><b>${bytes(size)}</b></div>`);
      const found = height === null ? null : at(event, height);
      let own = "";
      if (found !== null) {
        const one = about(found);
        own = `<div class="part">${swatch(one.colour)}<b>${escape(one.holds)}</b>, ${bytes(one.bytes)}<br>${escape(one.module)}<br>${escape(one.operation)} (${escape(one.made)})</div>`;
      }
      return `<div class="row"><span>${labels.event} ${event.toLocaleString("en")}: ${escape(where(event))}</span><b>${bytes(past.total[event])}</b></div>${parts.join("")}${own}`;
    }
    function draw() {
      const base = common();
      chart.setOption({
        ...base,
        grid: { left: 8, right: 16, top: 40, bottom: 64, containLabel: true },
        legend: { ...base.legend, data: [...raw.components.map((each) => each.title), labels.reserved_line], selectedMode: false },
        tooltip: { ...base.tooltip, trigger: "axis", axisPointer: { type: "line", snap: false, lineStyle: { color: css("--muted") } }, formatter: tip, transitionDuration: 0 },
        xAxis: { ...axisStyle(), type: "value", min: 0, max: last, splitLine: { show: false }, axisLabel: { ...axisStyle().axisLabel, formatter: (value) => value.toLocaleString("en") } },
        yAxis: { ...axisStyle(), type: "value", ...byteTicks(top), axisLabel: { ...axisStyle().axisLabel, formatter: bytes } },
        dataZoom: [
          { type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, minValueSpan: Math.min(10, last), startValue: view[0], endValue: view[1] },
          { type: "slider", filterMode: "none", height: 22, bottom: 8, brushSelect: true, showDetail: false, showDataShadow: false, borderColor: css("--line"), fillerColor: "rgb(90 130 180 / 22%)", minValueSpan: Math.min(10, last), startValue: view[0], endValue: view[1] },
        ],
        series: series(),
      }, { replaceMerge: ["series"] });
    }
    // Only what the view changes; ECharts draws it in its next frame, together with a move of the view.
    function renew() {
      clearTimeout(resting);
      refreshed = performance.now();
      const drawing = areas();
      chart.setOption({
        series: [...drawing.map((data, kind) => ({ id: `c${kind}`, data, step: step() })), { id: "reserved", markArea: { data: bands() } }],
      }, { lazyUpdate: true });
    }
    // While the view moves, what is drawn moves with it. New points come when it rests; before that, at most five
    // times a second, only where the view leaves the drawn events or is a third of them.
    function refresh() {
      const from = shown[0], to = shown[shown.length - 1];
      const isShort = view[0] < from || view[1] > to || (!every && 3 * (view[1] - view[0]) < to - from);
      clearTimeout(resting);
      resting = setTimeout(renew, isShort ? Math.max(0, 200 - (performance.now() - refreshed)) : 120);
    }
    function zoom(from, to) {
      const span = Math.max(10, Math.min(last, to - from));
      const begin = Math.max(0, Math.min(last - span, Math.round(from)));
      chart.dispatchAction({ type: "dataZoom", startValue: begin, endValue: begin + span });
    }
    function listing() {
      const groups = new Map(); // allocations of the same kind, in any layer, are one row
      let sum = 0, count = 0;
      for (let i = 0; i < past.count && past.born[i] <= cursor; i++) {
        if (past.died[i] <= cursor) continue;
        const key = `${kinds[raw.source[i]]} ${raw.bytes[i]}`, known = groups.get(key);
        if (known) known.count++; else groups.set(key, { i, count: 1 });
        sum += raw.bytes[i];
        count++;
      }
      const rows = [...groups.values()].sort((a, b) => raw.bytes[b.i] * b.count - raw.bytes[a.i] * a.count || a.i - b.i).slice(0, 25);
      const title = cursor === spec.peak ? labels.held_at_peak : `${labels.held_at} ${cursor.toLocaleString("en")} (${where(cursor)})`;
      table.caption.textContent = `${title}: ${count.toLocaleString("en")} allocations, ${bytes(sum)}`;
      table.tBodies[0].replaceChildren(...rows.map(({ i, count }) => {
        const one = about(i), row = document.createElement("tr"), together = one.bytes * count;
        const head = document.createElement("th"), swatch = document.createElement("span");
        swatch.className = "swatch"; swatch.style.setProperty("--tint", one.colour);
        head.scope = "row"; head.append(swatch, one.holds);
        row.append(head);
        const size = count > 1 ? `${count} × ${bytes(one.bytes)}` : bytes(one.bytes);
        for (const [text, number] of [[size, 1], [`${((100 * together) / sum).toFixed(1)} %`, 1], [count > 1 ? folded(one.module) : one.module], [one.operation], [one.made]]) {
          const cell = document.createElement("td");
          cell.append(...breakable(text));
          if (number) cell.className = "number";
          row.append(cell);
        }
        return row;
      }));
    }
    let later = 0;
    function move(event) {
      cursor = Math.max(0, Math.min(last, Math.round(event)));
      const span = view[1] - view[0];
      if (cursor < view[0] || cursor > view[1]) zoom(cursor - span / 2, cursor + span / 2);
      chart.setOption({ series: [{ id: "reserved", markLine: marks() }] });
      const text = `${labels.event} ${cursor.toLocaleString("en")}, ${where(cursor)}: ${bytes(past.total[cursor])} ${labels.total}`;
      output.textContent = text;
      clearTimeout(later);
      later = setTimeout(() => { listing(); document.getElementById("status").textContent = text; }, 60);
    }

    const tools = document.createElement("div");
    tools.className = "tools";
    const button = (text, act, title) => { const one = document.createElement("button"); one.type = "button"; one.textContent = text; one.title = title || text; one.setAttribute("aria-label", one.title); one.onclick = act; tools.append(one); };
    const lastStep = [...raw.bands].reverse().reduce((found, band) => band[1] === raw.bands[raw.bands.length - 1][1] ? band[0] : found, last);
    const middle = () => (cursor >= view[0] && cursor <= view[1] ? cursor : (view[0] + view[1]) / 2);
    const scale = (by) => { const span = (view[1] - view[0]) * by, share = (middle() - view[0]) / (view[1] - view[0] || 1); zoom(middle() - span * share, middle() + span * (1 - share)); };
    const toPeak = () => { const span = Math.min(view[1] - view[0], Math.max(200, last / 20)); move(spec.peak); zoom(spec.peak - span / 2, spec.peak + span / 2); };
    button(labels.whole, () => zoom(0, last));
    button(labels.last_step, () => zoom(lastStep, last));
    button(labels.to_peak, toPeak);
    button("+", () => scale(0.5), "Zoom in");
    button("−", () => scale(2), "Zoom out");
    const output = document.createElement("output");
    tools.append(output);
    box.before(tools);

    chart.on("dataZoom", (event) => {
      const one = event.batch ? event.batch[0] : event;
      view = one.startValue !== undefined ? [one.startValue, one.endValue] : [(one.start / 100) * last, (one.end / 100) * last];
      view = [Math.max(0, Math.floor(view[0])), Math.min(last, Math.ceil(view[1]))];
      refresh();
    });
    const pointer = (event) => {
      const [x, y] = chart.convertFromPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY]);
      let low = 0, high = shown.length - 1; // the drawn event nearest to the pointer
      while (low < high) { const half = (low + high) >> 1; if (shown[half] < x) low = half + 1; else high = half; }
      if (low > 0 && x - shown[low - 1] < shown[low] - x) low--;
      return { event: shown[low], height: y };
    };
    chart.getZr().on("mousemove", (event) => { mouse = chart.containPixel("grid", [event.offsetX, event.offsetY]) ? pointer(event) : null; });
    chart.getZr().on("click", (event) => { if (chart.containPixel("grid", [event.offsetX, event.offsetY])) move(pointer(event).event); });
    box.addEventListener("keydown", (event) => {
      const far = event.shiftKey ? Math.max(1, Math.round((view[1] - view[0]) / 100)) : 1;
      const acts = {
        ArrowLeft: () => move(cursor - far), ArrowRight: () => move(cursor + far), Home: () => move(0), End: () => move(last),
        "+": () => scale(0.5), "=": () => scale(0.5), "-": () => scale(2), p: toPeak, P: toPeak,
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
      event.preventDefault();
      acts[event.key]();
    });
    draw();
    output.textContent = `${labels.event} ${cursor.toLocaleString("en")}, ${where(cursor)}: ${bytes(past.total[cursor])} ${labels.total}`;
    chart.redraw = draw;
    return chart;
  }

  // ---- drawing when seen ----
  const kinds = { stack, treemap, scatter, timeline };
  function start(box, renderer) {
    const known = echarts.getInstanceByDom(box);
    return known || echarts.init(box, null, { renderer: renderer || "svg" });
  }
  async function draw(box) {
    const name = box.dataset.chart, spec = data[name];
    if (drawn.has(name)) return;
    drawn.set(name, () => {});
    try {
      const chart = await kinds[spec.chart](box, spec);
      drawn.set(name, () => (chart.redraw ? chart.redraw() : kinds[spec.chart](box, spec)));
      box.dataset.drawn = "true";
    } catch (error) {
      if (spec.chart !== "timeline" || typeof DecompressionStream !== "undefined") throw error;
      box.style.height = "auto";
      box.textContent = labels.no_unpack;
    }
  }
  const boxes = [...document.querySelectorAll(".canvas")];
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => { if (entry.isIntersecting) draw(entry.target); }), { rootMargin: "300px" });
  boxes.forEach((box) => seen.observe(box));
  // The others when there is time, so that a print has them all.
  const later = window.requestIdleCallback || ((act) => setTimeout(act, 500));
  const drawRest = () => { const next = boxes.find((box) => !drawn.has(box.dataset.chart)); if (next) { draw(next); later(drawRest); } };
  addEventListener("load", () => later(drawRest));
  let resizing = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(() => boxes.forEach((box) => { const chart = echarts.getInstanceByDom(box); if (chart) { chart.resize(); drawn.get(box.dataset.chart)(); } }));
  });
  const redraw = () => drawn.forEach((again) => again());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const theme = document.getElementById("theme");
  if (theme) theme.onclick = () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    redraw();
  };
  let before = null;
  addEventListener("beforeprint", () => {
    before = [root.dataset.theme, [...document.querySelectorAll("details:not([open])")]];
    before[1].forEach((each) => { each.open = true; });
    root.dataset.theme = "light";
    boxes.forEach(draw);
    redraw();
  });
  addEventListener("afterprint", () => {
    if (before[0]) root.dataset.theme = before[0]; else delete root.dataset.theme;
    before[1].forEach((each) => { each.open = false; });
    redraw();
  });
  document.querySelectorAll(".code").forEach((block) => {
    const copy = document.createElement("button");
    copy.type = "button";
    copy.textContent = labels.copy;
    copy.onclick = () => navigator.clipboard?.writeText(block.querySelector("code").textContent);
    block.append(copy);
  });
  // A page that shows this one in a frame makes it as high as this.
  if (parent !== window) {
    const tell = () => parent.postMessage({ trainatomyHeight: document.body.scrollHeight }, "*");
    addEventListener("load", tell); // browsers observe nothing in a frame that is out of sight
    new ResizeObserver(tell).observe(document.body);
  }
})();
