import { use } from "echarts/core";
import { BarChart, LineChart, ScatterChart, TreemapChart } from "echarts/charts";
import {
  DataZoomComponent,
  GridComponent,
  LegendComponent,
  MarkAreaComponent,
  MarkLineComponent,
  TooltipComponent,
} from "echarts/components";
import { CanvasRenderer, SVGRenderer } from "echarts/renderers";

export { getInstanceByDom, init } from "echarts/core";
use([
  BarChart, LineChart, ScatterChart, TreemapChart, DataZoomComponent, GridComponent, LegendComponent,
  MarkAreaComponent, MarkLineComponent, TooltipComponent, CanvasRenderer, SVGRenderer,
]);
